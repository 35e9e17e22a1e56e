"""Environments in worker processes: one per trajectory, under limits of number, time and length."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from mgrpo.environments.loop.losses import AcquireTimeout, EnvironmentLost, Losses, ResetFailed
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.offered.description import Description
from mgrpo.environments.workers.answer_forms import has_form
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.host import Host, Place, Queue, Tally
from mgrpo.environments.workers.link import PATIENCE_S, Link, new_child
from mgrpo.environments.workers.worker_instance import WorkerInstance
from mgrpo.processes.json_lines import ChildError, Message

_START_LIMIT_S = 120.0
"""Long, because imports from a slow network disk take long."""
_STARTS_BEFORE_GIVING_UP = 3
_PAUSE_BETWEEN_STARTS_S = 1.0
_TRIES_TO_BEGIN = 2


def describe(
    specs: Sequence[Spec], *, folders: Sequence[str] = (), python: str | None = None, variables: Sequence[str] = ()
) -> Description:
    """Read the environments' offers from one worker process, which then ends; prints their remarks. Blocks.

    Raises:
        ValueError: one cannot be built or set up; the message names its entry.
    """
    child = new_child(folders, python, variables)
    try:
        child.send([_load_question(specs, WorkerLimits()) | {"id": 0}])
        description = _description_in(child.receive(_START_LIMIT_S + PATIENCE_S))
    except (ChildError, TimeoutError) as err:
        raise ValueError(_not_started(specs, str(err))) from err
    finally:
        child.end()
    for remark in (remark for offer in description.offers for remark in offer.remarks):
        sys.stderr.write(f"mgrpo: {remark}\n")
    return description


class EnvironmentPool:
    """A pool of environments, for one asyncio loop at a time. Always `close` it; it may be started again.

    Implements `environments.loop.instance.Environments`. A worker that hangs or dies is replaced.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        pool_size: int,
        num_workers: int,
        limits: WorkerLimits | None = None,
        folders: Sequence[str] = (),
        python: str | None = None,
        variables: Sequence[str] = (),
    ) -> None:
        """Store the settings; `start` starts the workers.

        Args:
            pool_size: environments that exist at a time, over all workers.
            num_workers: processes; no more than `pool_size` are started.
            folders: further folders in which the workers find modules.
            python: their interpreter; None: this one.
            variables: names of variables of this process that they receive besides those without secrets.
        """
        if pool_size < 1 or num_workers < 1:
            raise ValueError(f"pool_size={pool_size} and env_workers={num_workers} must be at least 1")
        self._specs, self._limits = tuple(specs), limits or WorkerLimits()
        workers = min(num_workers, pool_size)
        self._capacities = [len(range(place, pool_size, workers)) for place in range(workers)]
        self._folders, self._python, self._variables = tuple(folders), python, tuple(variables)
        self._hosts: list[Host] = []
        self._tally = Tally()
        self._queue = Queue(self._limits.acquire_timeout_s, self._tally.asked_time)
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusal: str | None = "the environments are not started"
        """The reason why no environment is available."""
        self._losses = Losses()
        self._waits: list[float] = []
        self._num_replaced = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers' guards, of each of which the worker is a child."""
        return [host.link.pid for host in self._hosts]

    async def start(self) -> Description:
        """Start the workers.

        Raises:
            ValueError: an environment cannot be built or set up; the message names its entry.
        """
        assert not self._hosts, "it is started once, and again after it is closed"
        if not self._specs:
            return Description(offers=())
        try:
            for capacity in self._capacities:
                self._new_host(capacity)
            descriptions = await asyncio.gather(*map(self._load, self._hosts))
        except EnvironmentLost as err:
            await self.close()
            raise ValueError(_not_started(self._specs, str(err))) from err
        except BaseException:
            await self.close()
            raise
        self._refusal = None
        self._spawn(self._close_idle())
        return descriptions[0]

    async def close(self) -> None:
        """End everything, within seconds whatever tools do; open requests raise EnvironmentLost."""
        self._refuse("the environments are closed")
        for task in self._tasks:
            task.cancel()
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.is_closed = True
        try:
            await asyncio.gather(*(host.close_instances() for host in hosts))
        finally:
            for host in hosts:
                host.link.end()

    async def acquire(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> WorkerInstance:
        """A separate environment for a trajectory, see `Environments.acquire`.

        Raises:
            RuntimeError: the pool is closed, or workers cannot be started.
        """
        why = ""
        for attempt in range(_TRIES_TO_BEGIN):
            # One that has to begin again would otherwise wait behind a group of trajectories that waits for its own.
            host, number = await self._place(trajectory, is_first=attempt > 0)
            instance = WorkerInstance(host, number, self._limits)
            try:
                await instance.begin(row, seed=seed, trajectory=trajectory)
            except EnvironmentLost as err:
                why = str(err)
                await instance.release(broken=True)
            except BaseException:
                await instance.release(broken=True)
                raise
            else:
                return instance
        raise ResetFailed(f"no environment could begin {trajectory}, in {_TRIES_TO_BEGIN} tries: {why}")

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call: the mean wait for an environment, replaced workers, calls and resets that took too
        long, and the seconds with any open call."""
        tally = self._tally
        metrics = {
            "time/env_acquire": sum(self._waits) / len(self._waits) if self._waits else 0.0,
            "env/replaced": float(self._num_replaced),
            "env/timeouts": float(tally.num_late),
            "time/tools": tally.step_time.seconds,
        }
        self._waits, self._num_replaced, tally.num_late = [], 0, 0
        tally.step_time.reset()
        return metrics

    async def _place(self, trajectory: str, *, is_first: bool) -> Place:
        """An instance that is idle or may be made, reserved for the trajectory; `is_first`: before all others."""
        began = time.monotonic()
        try:
            return await self._reserved(trajectory, is_first=is_first)
        finally:
            self._waits.append(time.monotonic() - began)

    async def _reserved(self, trajectory: str, *, is_first: bool) -> Place:
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        place = self._queue.join(trajectory, is_first=is_first)
        self._hand_out()
        try:
            await self._queue.wait(place)
        except asyncio.CancelledError:
            if not place.cancel() and place.exception() is None:
                host, number = place.result()
                host.give_back(number, broken=False)
            raise
        if not place.done():
            place.cancel()
            raise AcquireTimeout(self._not_free(trajectory))
        return place.result()

    def _hand_out(self) -> None:
        """Assign free instances to the trajectories that have waited longest."""
        while (trajectory := self._queue.first) is not None:
            host = max(self._hosts, key=lambda host: host.room, default=None)
            if host is None or not host.room:
                return
            self._queue.serve_first((host, host.take(trajectory)))

    def _not_free(self, trajectory: str) -> str:
        now, limits = time.monotonic(), self._limits
        held = sorted((since, name) for host in self._hosts for name, since in host.held.values())
        longest = ", ".join(f"{name} for {now - since:.0f} s" for since, name in held[:3]) or "nothing"
        return (
            f"no environment became free for {trajectory} within {limits.acquire_timeout_s:g} s: {len(held)} of "
            f"pool_size={sum(self._capacities)} are held, the longest by {longest}; raise pool_size, or lower tool_timeout or "
            "trajectory_timeout"
        )

    async def _close_idle(self) -> None:
        """Close idle environments: those of a peak, such as an evaluation, are not kept for the whole run."""
        while True:
            await asyncio.sleep(self._limits.idle_s / 2)
            for host in self._hosts:
                host.close_idle(self._limits.idle_s)

    def _new_host(self, capacity: int) -> Host:
        worker = new_child(self._folders, self._python, self._variables)
        host = Host(
            Link(worker, lambda why: self._replace(host, why), fits=has_form),
            capacity,
            tally=self._tally,
            grace_s=self._limits.grace_s,
            spawn=self._spawn,
            when_free=self._hand_out,
        )
        self._hosts.append(host)
        return host

    async def _load(self, host: Host) -> Description:
        question = _load_question(self._specs, self._limits)
        description = _description_in(await host.link.ask(question, _START_LIMIT_S))
        host.is_ready = True
        return description

    def _replace(self, host: Host, why: str) -> None:
        """Start another worker in place of one that has ended."""
        if host not in self._hosts or not host.is_ready:
            return
        self._hosts.remove(host)
        self._num_replaced += 1
        names = ", ".join(sorted(name for name, _ in host.held.values())) or "none"
        self._losses.say("worker", f"a worker of the environments {why}; trajectories in it: {names:.300}")
        self._spawn(self._start_again(host.capacity))

    async def _start_again(self, capacity: int) -> None:
        why: Exception | None = None
        for attempt in range(_STARTS_BEFORE_GIVING_UP):
            await asyncio.sleep(_PAUSE_BETWEEN_STARTS_S * attempt)
            host: Host | None = None
            try:
                host = self._new_host(capacity)
                await self._load(host)
            except (EnvironmentLost, ValueError, OSError) as err:
                why = err
                if host is not None:
                    self._hosts.remove(host)
                    host.link.end()
            else:
                self._hand_out()
                return
        self._refuse(_not_started(self._specs, f"{why}, {_STARTS_BEFORE_GIVING_UP} times in a row"))

    def _refuse(self, why: str) -> None:
        """Raise an error in trajectories that wait for an environment, and in those that request one from now on."""
        self._refusal = why
        self._queue.refuse(why)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _load_question(specs: Sequence[Spec], limits: WorkerLimits) -> Message:
    """The first request to a worker; its first environment is then instance 0."""
    return {
        "ask": "load",
        "instance": 0,
        "specs": [spec.to_json() for spec in specs],
        "limits": dataclasses.asdict(limits),
        "arguments": sys.argv,
        "limit_s": _START_LIMIT_S,
    }


def _description_in(answer: Message) -> Description:
    """The worker's offers.

    Raises:
        ValueError: an environment cannot be built.
    """
    if "error" in answer:
        raise ValueError(f"the tools cannot be started: {answer['error']}")
    try:
        return Description.from_json(answer["description"])
    except (AttributeError, KeyError, TypeError) as err:
        raise ValueError(f"the tools cannot be started: their worker describes them as {answer!r:.200}") from err


def _not_started(specs: Sequence[Spec], why: str) -> str:
    entries = ", ".join(spec.entry for spec in specs)
    return f"a worker of the environments cannot be started with {entries}: {why}; its own message is on stderr"
