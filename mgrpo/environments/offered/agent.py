"""An agent that drives a trajectory through the address of the model, and reports its outcome at the end.

It runs in a worker process. Standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mgrpo.environments.environment import LARGEST, Environment, fits_float32
from mgrpo.environments.offered.calling import outcome, said

Run = Callable[..., Awaitable[float | None]]
CHECK_S = 300.0
"""Longest time of a check, after the agent's own limit."""
ENDING_S = CHECK_S + 30.0
"""`CHECK_S` plus time to clean up."""
MOST_OUTPUT_CHARS = 1 << 14
"""Most characters kept of an agent's output, from its end."""
_LEAST_MASKED_CHARS = 6
"""Shorter values of variables are words that occur anywhere."""
_MOST_METRICS = 64
_METRIC = re.compile(r"[\w./:@-]{1,80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address and keys of one trajectory's model."""

    base_url: str
    """URL for clients of Anthropic's API; with /v1 appended for OpenAI's."""
    api_key: str
    model: str = "policy"
    """A name for the model; any other means the same."""
    reward_key: str | None = None
    """The key for POST /reward; None: the agent does not decide its reward."""
    trajectory: str = ""
    """The trajectory's id."""
    seed: int = 0
    """Seed, the same for all samples of a prompt."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics, reported as env/{agent}/{metric}."""

    @property
    def openai_url(self) -> str:
        """The base URL for clients of OpenAI's API."""
        return f"{self.base_url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an agent's run."""

    ended: Literal["ended", "crashed", "late"]
    status: int | None = None
    """Exit status of its process."""
    output: str = ""
    """The last part of its output, or of its error."""
    reward: float | None = None
    """Reward from the agent or its check; None: verifiers and reward functions decide."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Agent(Environment):
    """An agent that plays one trajectory at a time. A subclass has `run`."""

    ending_s: float = 0.0
    """Seconds that `run` may take beyond its limit; it is then cancelled as late."""
    remarks: tuple[str, ...] = ()
    """Sentences for the user, before a run starts."""
    row: Mapping[str, Any]
    seed: int

    async def run(self, endpoint: Endpoint, *, truth: Mapping[str, Any], limit_s: float) -> Outcome:
        """Play the trajectory of the row that `reset` was given, for at most `limit_s` seconds.

        Args:
            truth: the columns of the row that the agent must not see.
        """
        raise NotImplementedError

    def reset(self, row: Mapping[str, Any], *, seed: int) -> Awaitable[None] | None:
        self.row, self.seed = row, seed
        return None


class FunctionAgent(Agent):
    """`async def run(row, endpoint, **settings) -> float | None`, a function of the user's; the number is the reward, if agents set theirs."""

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
        returned, err = await outcome(self._function, self.row, endpoint, **self._settings)
        if isinstance(err, asyncio.CancelledError):
            raise err
        if err is not None:
            return Outcome(ended="crashed", output=_traceback(err))
        try:
            reward, metrics = checked_reward(returned), checked_metrics(endpoint.metrics)
        except ValueError as refusal:
            return Outcome(ended="crashed", output=f"{self.name} gave {refusal}")
        # Without the key its own word does not count.
        return Outcome(ended="ended", reward=None if endpoint.reward_key is None else reward, metrics=metrics)


def masked(text: str, hidden: Sequence[str]) -> str:
    """A text without these values, which may contain each other."""
    for value in sorted(hidden, key=len, reverse=True):
        if len(value) >= _LEAST_MASKED_CHARS:
            text = text.replace(value, "***")
    return text


def checked_reward(value: object) -> float | None:
    """A reward as an agent or its check has given it.

    Raises:
        ValueError: it is no number that float32 holds.
    """
    if value is None:
        return None
    if (number := _number(value)) is None:
        raise ValueError(f"{value!r:.80}, expected the reward as a number of at most {LARGEST:g} (float32), or None")
    return number


def checked_metrics(values: object) -> dict[str, float]:
    """Metrics by name, as an agent or its check has given them.

    Raises:
        ValueError: they are not a few numbers that float32 holds, under short names.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"metrics={values!r:.80}, expected an object of numbers")
    if len(values) > _MOST_METRICS:
        raise ValueError(f"{len(values)} metrics, expected at most {_MOST_METRICS}")
    found = {}
    for name, value in values.items():
        number = _number(value)
        if not isinstance(name, str) or not _METRIC.fullmatch(name) or number is None:
            raise ValueError(
                f"the metric {name!r:.80} = {value!r:.80}, expected a short name and a number of at most {LARGEST:g} (float32)"
            )
        found[name] = number
    return found


def _number(value: object) -> float | None:
    """A number that float32 holds, not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits_float32(value):
        return None
    return float(value)


def _traceback(err: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(err))
    # The exception's own methods are the user's.
    except Exception:
        text = said(err)
    return text.encode(errors="replace").decode()[-MOST_OUTPUT_CHARS:]
