"""A trajectory's own environment, as the loop sees it. Those in worker processes are in `workers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mgrpo.environments.environment import Answered, Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """An environment's verdict on a trajectory that is over."""

    reward: float | None = None
    """The reward of the whole trajectory; None: it leaves that to others."""
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serializable public attributes of the environment."""


class Instance(Protocol):
    """An environment while it serves one trajectory. Always `release` it."""

    opening: str
    """Text for the prompt's last user message; "": none."""
    metrics: Mapping[str, float]
    """Metrics of the reset."""
    active: frozenset[str]
    """Names that this trajectory may call."""
    acts: bool
    """True if a turn as a whole is one action: the call "act" with the argument "text"."""

    async def step(self, calls: Sequence[Call]) -> list[Answered]:
        """Answers to all calls of one turn, in their order.

        A call that fails or exceeds its time limit has a failed observation with the reason as its text. When a call hangs
        and cannot be ended, those after it fail as well.

        Raises:
            EnvironmentLost: the environment is gone, not through a call of this trajectory.
        """

    async def resume(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Resume the trajectory's program, see `Program.resume`; its next sampling request, or its result.

        Raises:
            EnvironmentLost: it has failed, or was late.
        """

    async def run_agent(self, endpoint: dict[str, Any], *, truth: dict[str, Any], limit_s: float) -> Mapping[str, Any]:
        """Run the trajectory's agent to its end; its outcome, see `Outcome`.

        Args:
            endpoint: the fields of `offered.agent.Endpoint`.
            truth: the columns of the row that only a check may see.
        Raises:
            EnvironmentLost: its process is gone, or it cannot be ended.
        """

    async def ending(self) -> Ending:
        """The reward and the state at the end; called once, after the last step.

        Raises:
            EnvironmentLost: no answer from an environment with a reward or a state.
        """

    async def release(self, broken: bool = False) -> None:
        """Release it; never raises, and may be called twice.

        Args:
            broken: it must not serve another trajectory.
        """


class Environments(Protocol):
    """The source of instances."""

    async def acquire(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Instance:
        """A separate instance for a new trajectory, in the order of the requests.

        Args:
            row: the prompt's columns, without its ground truth; those that JSON cannot hold are left out.
            seed: the same for all samples of a prompt.
            trajectory: its name, for tools and messages.
        Raises:
            AcquireTimeout: none became free in time; the message names the trajectories that hold them.
            ResetFailed: none could begin, in two tries.
            RuntimeError: environments are no longer given out.
        """
