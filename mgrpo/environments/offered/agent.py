"""An agent that plays a trajectory by itself: it is given the address of the model, and what it did is told at its end.

It runs in a worker process. Standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mgrpo.environments.environment import Environment
from mgrpo.environments.offered.calling import outcome, said

Run = Callable[..., Awaitable[float | None]]
_MOST_OUTPUT_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the model of one trajectory is reached."""

    base_url: str
    """For clients of Anthropic's API; OpenAI's take it with /v1 behind it."""
    api_key: str
    model: str = "policy"
    """A name for the model; any other means the same."""
    reward_key: str | None = None
    """The key for POST /reward; None: the agent does not decide its reward."""
    trajectory: str = ""
    """The trajectory's id."""
    seed: int = 0
    """The same for all samples of a prompt."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Reported as env/{agent}/{metric}."""

    @property
    def openai_url(self) -> str:
        """The base URL for clients of OpenAI's API."""
        return f"{self.base_url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an agent ended."""

    ended: Literal["ended", "crashed", "late"]
    status: int | None = None
    """Exit status of its process."""
    output: str = ""
    """The last part of what it printed, or of its error."""
    reward: float | None = None
    """By its own word or that of a check; None: verifiers and reward functions decide."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Agent(Environment):
    """Plays one trajectory at a time. A subclass has `run`."""

    async def run(self, endpoint: Endpoint, *, truth: Mapping[str, Any], limit_s: float) -> Outcome:
        """Play the trajectory of the row that `reset` was given, until it ends or `limit_s` seconds have passed.

        Args:
            truth: the columns of the row that the agent must not see.
        """
        raise NotImplementedError

    def reset(self, row: Mapping[str, Any], *, seed: int) -> None:
        self.row, self.seed = row, seed


class FunctionAgent(Agent):
    """`async def run(row, endpoint, **settings) -> float | None`, a function of the user's; the number is the reward."""

    def __init__(self, function: Run, **settings: Any) -> None:
        if not inspect.iscoroutinefunction(function):
            raise ValueError(
                "it must be an async function: `async def run(row, endpoint, **settings)`, which asks the model at endpoint.openai_url"
            )
        try:
            inspect.signature(function).bind({}, None, **settings)
        except TypeError as err:
            raise ValueError(f"it is called as {function.__name__}(row, endpoint, **settings), and {err}") from err
        self.name = function.__name__
        self._function, self._settings = function, settings

    async def run(self, endpoint: Endpoint, *, truth: Mapping[str, Any], limit_s: float) -> Outcome:
        task = asyncio.create_task(outcome(self._function, self.row, endpoint, **self._settings))
        try:
            await asyncio.wait({task}, timeout=limit_s)
        finally:
            # A function that goes on nevertheless is the worker's affair.
            task.cancel()
        if not task.done():
            await asyncio.wait({task})
            return Outcome(ended="late", output=f"it was cancelled after {limit_s:g} s")
        returned, err = task.result()
        if err is not None:
            lines = traceback.format_exception(err)
            return Outcome(ended="crashed", output=("".join(lines) or said(err))[-_MOST_OUTPUT_CHARS:])
        try:
            reward = checked_reward(returned)
        except ValueError as refusal:
            return Outcome(ended="crashed", output=f"{self.name} returned {refusal}")
        return Outcome(ended="ended", reward=reward, metrics=_numbers(endpoint.metrics))


def checked_reward(value: object) -> float | None:
    """A reward as an agent or its check has given it.

    Raises:
        ValueError: it is no finite number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80}, expected the reward as a finite number, or None")
    return float(value)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
