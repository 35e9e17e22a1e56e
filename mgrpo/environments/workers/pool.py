"""Environments in worker processes: each trajectory has one of its own, under limits of number, time and length."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.environments.offered.catalog import Description, Spec
from mgrpo.environments.workers.errors import AcquireTimeout, EnvironmentLost, Frozen, ResetFailed
from mgrpo.environments.workers.fleet import Workers, not_started
from mgrpo.environments.workers.host import START_LIMIT_S, Host, description_in, load_question
from mgrpo.environments.workers.instance import Answered, Ending, Instance
from mgrpo.environments.workers.limits import WorkerLimits
from mgrpo.environments.workers.link import PATIENCE_S, new_child
from mgrpo.environments.workers.plain import sendable
from mgrpo.processes.json_lines import ChildError, Message
from mgrpo.processes.stopwatch import Stopwatch

__all__ = [
    "AcquireTimeout",
    "Answered",
    "Description",
    "Ending",
    "EnvironmentLost",
    "EnvironmentPool",
    "Instance",
    "ResetFailed",
    "Spec",
    "WorkerLimits",
    "describe",
]

_TRIES_TO_BEGIN = 2


def describe(specs: Sequence[Spec], *, folders: Sequence[str] = (), python: str | None = None) -> Description:
    """What the environments offer, asked of one worker process, which then ends. Blocks.

    Raises:
        ValueError: one cannot be built or set up; the message names its entry.
    """
    child = new_child(folders, python)
    try:
        child.send([load_question(specs, WorkerLimits()) | {"id": 0}])
        return description_in(child.receive(START_LIMIT_S + PATIENCE_S))
    except (ChildError, TimeoutError) as err:
        raise ValueError(not_started(specs, str(err))) from err
    finally:
        child.end()


class EnvironmentPool:
    """A pool of environments, for one asyncio loop at a time. Always `close` it; it may be started again."""

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        pool_size: int,
        num_workers: int,
        limits: WorkerLimits | None = None,
        folders: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            pool_size: environments that exist at a time, over all workers.
            num_workers: processes; no more than `pool_size` are started.
            folders: further folders in which the workers find modules.
            python: their interpreter; None: this one.
        """
        if pool_size < 1 or num_workers < 1:
            raise ValueError(f"pool_size={pool_size} and env_workers={num_workers} must be at least 1")
        self._limits = limits or WorkerLimits()
        workers = min(num_workers, pool_size)
        capacities = [len(range(place, pool_size, workers)) for place in range(workers)]
        self._fleet = Workers(tuple(specs), capacities, self._limits, folders=tuple(folders), python=python)
        self._num_steps = 0
        """That are waited for now."""
        self._tool_time = Stopwatch()
        self._waits: list[float] = []
        self._num_timeouts = self._num_replaced = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers' guards, of each of which the worker is a child."""
        return self._fleet.pids

    async def start(self) -> Description:
        """Start the workers.

        Raises:
            ValueError: an environment cannot be built or set up; the message names its entry.
        """
        return await self._fleet.start()

    async def acquire(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Instance:
        """An environment of its own for a trajectory, in the order of the requests.

        Args:
            row: the prompt's columns, without its ground truth; those that JSON cannot hold are left out.
            seed: the same for all samples of a prompt.
            trajectory: its name, for tools and messages.
        Raises:
            AcquireTimeout: none became free in time; the message names who holds them.
            ResetFailed: none could begin, in two tries.
            RuntimeError: the pool is closed, or no worker can be started any more.
        """
        question = {"ask": "reset", "row": sendable(row), "seed": seed, "trajectory": trajectory}
        why = ""
        for attempt in range(_TRIES_TO_BEGIN):
            host, number = await self._place(trajectory, is_first=attempt > 0)
            begun: Message = {}
            try:
                begun = await self._ask(host, number, question, self._limits.reset_timeout_s)
                why = begun.get("error", "")
            except EnvironmentLost as err:
                why = str(err)
            finally:
                if "opening" not in begun:
                    self._fleet.give_back(host, number, broken=True)
            if "opening" in begun:
                ask = functools.partial(self._ask, host, number)
                give_back = functools.partial(self._fleet.give_back, host, number, ends=begun["ends"])
                return Instance(begun, self._limits, ask=ask, give_back=give_back)
        raise ResetFailed(f"no environment could begin {trajectory}, in {_TRIES_TO_BEGIN} tries: {why}")

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: the mean wait for an environment, workers that were replaced, calls and resets that took too
        long, and the seconds in which any call was waited for."""
        waits, self._waits = self._waits, []
        metrics = {
            "time/env_acquire": sum(waits) / len(waits) if waits else 0.0,
            "env/replaced": float(self._fleet.num_replaced - self._num_replaced),
            "env/timeouts": float(self._num_timeouts),
            "time/tools": self._tool_time.seconds,
        }
        self._num_replaced, self._num_timeouts = self._fleet.num_replaced, 0
        self._tool_time.reset()
        return metrics

    async def close(self) -> None:
        """End everything, within seconds whatever tools do; whoever waits for an answer gets an EnvironmentLost."""
        await self._fleet.close()

    async def _place(self, trajectory: str, *, is_first: bool) -> tuple[Host, int]:
        began = time.monotonic()
        try:
            return await self._fleet.place(trajectory, is_first=is_first)
        finally:
            self._waits.append(time.monotonic() - began)

    async def _ask(self, host: Host, number: int, question: Message, limit_s: float) -> Message:
        """What the worker answers about an instance, counted."""
        is_step = question["ask"] in ("step", "resume")
        self._num_steps += is_step
        self._tool_time.run(self._num_steps > 0)
        try:
            answer = await self._fleet.ask(host, number, question, limit_s)
        except Frozen:
            self._num_timeouts += 1
            raise
        finally:
            self._num_steps -= is_step
            self._tool_time.run(self._num_steps > 0)
        self._num_timeouts += sum(late for _, _, late in answer.get("answers", ())) + answer.get("timed_out", False)
        return answer
