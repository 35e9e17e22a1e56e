"""Environments in worker processes: each trajectory has one of its own, under limits of number, time and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgrpo.environments.catalog import Description, Spec
from mgrpo.environments.instance import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of everything that an environment does."""

    tool_timeout_s: float = 30.0
    """Of one call."""
    reset_timeout_s: float = 60.0
    """Of an environment's set-up and reset."""
    acquire_timeout_s: float = 60.0
    """Until one is free for a trajectory."""
    grace_s: float = 30.0
    """For which other trajectories of a worker go on when a call in it hangs and cannot be cancelled."""
    output_bytes: int = 1 << 16
    """Of an observation's text in UTF-8; a longer one is cut in the middle."""


class AcquireTimeout(RuntimeError):
    """No environment became free in time."""


class ResetFailed(RuntimeError):
    """Two environments could not begin the trajectory."""


def describe(specs: Sequence[Spec], *, folders: Sequence[str] = (), timeout_s: float = 120.0) -> Description:
    """What the environments offer, asked of one worker process, which then ends. Blocks.

    Raises:
        ValueError: one cannot be built; the message names its entry.
    """
    raise NotImplementedError


class Environments:
    """A pool of environments, for one asyncio loop at a time. Always `close` it; it may be started again."""

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        pool_size: int,
        num_workers: int,
        limits: Limits | None = None,
        folders: Sequence[str] = (),
    ) -> None:
        """Starts nothing.

        Args:
            pool_size: environments that exist at a time, over all workers.
            num_workers: processes; no more than `pool_size` are started.
            folders: further folders in which the workers find modules.
        """

    async def start(self) -> Description:
        """Start the workers.

        Raises:
            ValueError: an environment cannot be built; the message names its entry.
            RuntimeError: no worker starts.
        """
        raise NotImplementedError

    async def acquire(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Instance:
        """An environment of its own for a trajectory, in order of the requests.

        Args:
            row: the prompt's columns, without its ground truth; JSON must hold them.
            seed: the same for all samples of a prompt.
            trajectory: its name, for tools and messages.
        Raises:
            AcquireTimeout: none became free; the message names who holds them.
            ResetFailed: it could not begin, twice.
            RuntimeError: the pool is closed.
        """
        raise NotImplementedError

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: env/acquire_wait_s (mean), env/replaced (workers), env/timeouts (calls and resets),
        env/lost (trajectories), time/tools (seconds in which any call was waited for)."""
        raise NotImplementedError

    async def close(self) -> None:
        """End everything, within seconds whatever tools do; whoever waits for an answer gets an EnvironmentLost."""
        raise NotImplementedError
