"""A trajectory's own environment, which lives in a worker process, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgrpo.environments.environment import Call, Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came of one call."""

    observation: Observation
    seconds: float
    """How long it took; calls of one turn that are answered together share the time equally."""
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What an environment says of a trajectory that is over."""

    reward: float | None = None
    """Of the whole trajectory; None: it leaves that to others."""
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    """Its public attributes that JSON can hold."""


class EnvironmentLost(RuntimeError):
    """The worker process of a trajectory's environment died or was killed: the trajectory has no score."""


class Instance:
    """An environment while it serves one trajectory. Always `release` it."""

    opening: str
    """Text for the prompt's last user message; "": nothing."""
    active: frozenset[str]
    """Names that this trajectory may call."""
    acts: bool
    """Whether a turn as a whole is one action: the call "act" with the argument "text"."""

    async def step(self, calls: Sequence[Call]) -> list[Answered]:
        """Answers to all calls of one turn, in their order.

        A call that fails, or takes longer than its limit, has a failed observation, which tells the model why.

        Raises:
            EnvironmentLost: the worker process ended, not through a call of this trajectory.
        """
        raise NotImplementedError

    async def ending(self) -> Ending:
        """The reward and the state at the end; to be asked once, after the last step.

        Raises:
            EnvironmentLost: there is no answer, although the environment would have given a reward.
        """
        raise NotImplementedError

    async def release(self, broken: bool = False) -> None:
        """Give it back; never raises, and may be called twice.

        Args:
            broken: it must not serve another trajectory.
        """
        raise NotImplementedError
