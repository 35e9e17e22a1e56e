"""The protocol between a trajectory and whatever answers its turns. Standard library only.

A worker process imports this, and neither torch nor a tokenizer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LARGEST = 2.0**128 - 2.0**104
"""Largest reward and metric, as `rewards.verifier.LARGEST`: beyond it float32, which holds them in the learner, is infinite."""


def fits_float32(number: float) -> bool:
    """True for a number that is finite in float32."""
    return abs(number) <= LARGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a tool, as it was read from a turn."""

    name: str
    """The tool's name."""
    arguments: Mapping[str, Any]
    """The arguments by name, as the model wrote them."""
    id: str = ""
    """The model's own name for this call, in formats that have ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The environment's answer to one call, or to a turn as a whole."""

    text: str = ""
    """Text for the model; ignored after `done`."""
    reward: float = 0.0
    """The reward of this step."""
    done: bool = False
    """True: the trajectory is over."""
    failed: bool = False
    """True: counted as a failed call; the text is the reason."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics, reported as env/{name}/{metric}; the last value of a trajectory counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One call's observation and its duration."""

    observation: Observation
    seconds: float
    """Duration in seconds; calls of one turn to the same environment share the time equally."""
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """The specification of a tool in the model's prompt."""

    name: str
    """The name by which the model calls it."""
    description: str
    """The tool's purpose, for the model."""
    parameters: Mapping[str, Any]
    """A JSON schema of type "object"."""
    returns: Mapping[str, Any] | None = None
    """A JSON schema of the result; few templates show it."""

    @property
    def schema(self) -> dict[str, Any]:
        """The form that chat templates take: `{"type": "function", "function": {...}}`."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        if self.returns is not None:
            function["return"] = dict(self.returns)
        return {"type": "function", "function": function}


class Environment:
    """Environment of one trajectory at a time, reset for the next. Methods may be coroutines instead.

    A subclass overrides the methods it needs. It lives in a worker process; its settings come from `tool_configs`, as JSON.
    """

    name: str = ""
    """The name in metrics; by default the class's."""
    trajectory: str = ""
    """The id of the trajectory that it serves, set before `reset`."""
    is_repeatable: bool = False
    """True if the same seed and calls give the same observations; a run then repeats exactly."""

    def setup(self) -> Awaitable[None] | None:
        """Open costly resources, once per instance, before its first trajectory."""

    def tools(self) -> Sequence[Tool]:
        """The tools that the model may call, the same for every trajectory. None: a turn as a whole is one action, the call
        "act" with the argument "text"."""
        return ()

    def reset(self, row: Mapping[str, Any], *, seed: int) -> Observation | Awaitable[Observation | None] | None:
        """Begin a trajectory.

        Args:
            row: the prompt's columns, without its ground truth; `env_config` holds the row's settings for this environment.
            seed: the same for all samples of a prompt; their opening texts must be equal.
        Returns:
            Text that is added to the prompt's last user message, and metrics; None: nothing. Only a step rewards or ends.
        """

    def step(self, calls: Sequence[Call]) -> Sequence[Observation] | Awaitable[Sequence[Observation]]:
        """Answer all calls of one turn, in their order: one observation each."""
        raise NotImplementedError

    def reward(self) -> float | Awaitable[float | None] | None:
        """The reward of the whole trajectory; None: verifiers, reward functions and steps decide."""
        return None

    def end(self) -> Awaitable[None] | None:
        """Release the trajectory's resources, such as memory, files and processes, after `reward`. Not called if `close`
        follows at once."""

    def close(self) -> Awaitable[None] | None:
        """Close the instance, which is not used again."""
