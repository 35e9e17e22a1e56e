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
    """Shown to the model; nothing is shown after `done`."""
    reward: float = 0.0
    """The reward of this step."""
    done: bool = False
    """The trajectory is over."""
    failed: bool = False
    """Counts as a failed call; the text says why."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Reported as env/{name}/{metric}; the last value of a trajectory counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One call's observation, and how it went."""

    observation: Observation
    seconds: float
    """Its time; calls of one turn that the same environment answers share the time equally."""
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool as the model is told of it."""

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
    """Answers the turns of one trajectory at a time; then it is reset for another. Methods may be coroutines instead.

    A subclass overrides what it needs. It lives in a worker process; its settings come from `tool_configs`, as JSON.
    """

    name: str = ""
    """The name in metrics; by default the class's."""
    trajectory: str = ""
    """The id of the trajectory that it serves, set before `reset`."""
    is_repeatable: bool = False
    """Whether the same seed and the same calls give the same observations: then a run repeats exactly."""

    def setup(self) -> Awaitable[None] | None:
        """Once for an instance, before its first trajectory: open what is costly."""

    def tools(self) -> Sequence[Tool]:
        """The tools that the model may call, the same for every trajectory. None: a turn as a whole is one action, the call
        "act" with the argument "text"."""
        return ()

    def reset(self, row: Mapping[str, Any], *, seed: int) -> Observation | Awaitable[Observation | None] | None:
        """Begin a trajectory.

        Args:
            row: the prompt's columns, without its ground truth; `env_config` holds what the row sets for this environment.
            seed: the same for all samples of a prompt; what they are shown must be equal.
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
        """The trajectory is over, after `reward`: let go of what it left, such as memory, files and processes. Not called where
        `close` follows at once."""

    def close(self) -> Awaitable[None] | None:
        """The instance is not used again."""
