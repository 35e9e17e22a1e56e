"""Environments in worker processes: each trajectory has one of its own, under limits of number, time and length.

What hangs or dies is replaced. A call that cannot be cancelled costs its worker: that takes no new trajectory, the others
in it go on for a while, then it is killed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from mgrpo.environments.catalog import Description, Spec
from mgrpo.environments.errors import AcquireTimeout, EnvironmentLost, Frozen, ResetFailed
from mgrpo.environments.host import START_LIMIT_S, Host, description_in, load_question
from mgrpo.environments.instance import Answered, Ending, Instance
from mgrpo.environments.limits import Limits
from mgrpo.environments.link import Link, new_child
from mgrpo.processes.json_lines import ChildError, Message
from mgrpo.processes.stopwatch import Stopwatch

__all__ = [
    "AcquireTimeout",
    "Answered",
    "Description",
    "Ending",
    "EnvironmentLost",
    "Environments",
    "Instance",
    "Limits",
    "ResetFailed",
    "describe",
]

_log = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 5.0
_STARTS_BEFORE_GIVING_UP = 3
_PAUSE_BETWEEN_STARTS_S = 1.0
_TRIES_TO_BEGIN = 2
_LOGGED_LOSSES = 10
_STUCK = "held a call that could not be ended, and was killed"


def describe(specs: Sequence[Spec], *, folders: Sequence[str] = ()) -> Description:
    """What the environments offer, asked of one worker process, which then ends. Blocks.

    Raises:
        ValueError: one cannot be built or set up; the message names its entry.
    """
    child = new_child(folders)
    try:
        child.send([load_question(specs, Limits()) | {"id": 0}])
        return description_in(child.receive(START_LIMIT_S))
    except (ChildError, TimeoutError) as err:
        raise ValueError(_not_started(specs, str(err))) from err
    finally:
        child.end()


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
        if pool_size < 1 or num_workers < 1:
            raise ValueError(f"pool_size={pool_size} and env_workers={num_workers} must be at least 1")
        self._specs, self._limits, self._folders = tuple(specs), limits or Limits(), tuple(folders)
        workers = min(num_workers, pool_size)
        self._capacities = [len(range(place, pool_size, workers)) for place in range(workers)]
        self._hosts: list[Host] = []
        self._queue: deque[tuple[asyncio.Future[tuple[Host, int]], str]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusal: str | None = "the environments are not started"
        self._reset_metrics()
        self._num_steps = 0
        """That are waited for now."""
        self._tool_time = Stopwatch()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers' guards, whose only child each is."""
        return [host.link.pid for host in self._hosts]

    async def start(self) -> Description:
        """Start the workers.

        Raises:
            ValueError: an environment cannot be built or set up; the message names its entry.
        """
        assert not self._hosts, "it is started once, and again after it is closed"
        try:
            self._hosts = [self._new_host(capacity) for capacity in self._capacities]
            descriptions = await asyncio.gather(*map(self._load, self._hosts))
        except EnvironmentLost as err:
            await self.close()
            raise ValueError(_not_started(self._specs, str(err))) from err
        except BaseException:
            await self.close()
            raise
        self._refusal = None
        return descriptions[0]

    async def acquire(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Instance:
        """An environment of its own for a trajectory, in the order of the requests.

        Args:
            row: the prompt's columns, without its ground truth; JSON must hold them.
            seed: the same for all samples of a prompt.
            trajectory: its name, for tools and messages.
        Raises:
            AcquireTimeout: none became free in time; the message names who holds them.
            ResetFailed: none could begin, in two tries.
            RuntimeError: the pool is closed, or no worker can be started any more.
        """
        question = {"ask": "reset", "row": dict(row), "seed": seed, "trajectory": trajectory}
        why = ""
        for _ in range(_TRIES_TO_BEGIN):
            host, number = await self._place(trajectory)
            begun: Message = {}
            try:
                begun = await self._ask(host, number, question, self._limits.reset_timeout_s)
            except EnvironmentLost as err:
                why = str(err)
            finally:
                if "opening" not in begun:
                    self._give_back(host, number, True)
            if "opening" in begun:
                ask = functools.partial(self._ask, host, number)
                return Instance(
                    begun, self._limits, ask=ask, give_back=functools.partial(self._give_back, host, number)
                )
            why = begun.get("error", why)
        raise ResetFailed(f"no environment could begin {trajectory}, in {_TRIES_TO_BEGIN} tries: {why}")

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: the mean wait for an environment, workers that were replaced, calls and resets that took too
        long, and the seconds in which any call was waited for."""
        waits = self._waits
        metrics = {
            "env/acquire_wait_s": sum(waits) / len(waits) if waits else 0.0,
            "env/replaced": float(self._num_replaced),
            "env/timeouts": float(self._num_timeouts),
            "time/tools": self._tool_time.seconds,
        }
        self._reset_metrics()
        self._tool_time.reset()
        return metrics

    async def close(self) -> None:
        """End everything, within seconds whatever tools do; whoever waits for an answer gets an EnvironmentLost."""
        self._refuse("the environments are closed")
        for task in self._tasks:
            task.cancel()
        hosts, self._hosts = self._hosts, []
        closing = [
            asyncio.ensure_future(host.link.ask(_close_question(number), _CLOSE_LIMIT_S))
            for host in hosts
            if host.is_ready and not host.link.is_over
            for number in host.instances
        ]
        try:
            if closing:
                await asyncio.wait(closing, timeout=_CLOSE_LIMIT_S)
        finally:
            for task in closing:
                task.cancel()
            for host in hosts:
                host.link.end()

    async def _place(self, trajectory: str) -> tuple[Host, int]:
        """An instance that is idle or may be made, reserved for the trajectory."""
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        began = time.monotonic()
        place: asyncio.Future[tuple[Host, int]] = asyncio.get_running_loop().create_future()
        self._queue.append((place, trajectory))
        self._hand_out()
        try:
            await asyncio.wait({place}, timeout=self._limits.acquire_timeout_s)
        except asyncio.CancelledError:
            if place.done() and place.exception() is None:
                self._give_back(*place.result(), False)
            raise
        finally:
            self._waits.append(time.monotonic() - began)
            place.cancel()
        if place.cancelled():
            raise AcquireTimeout(self._who_holds(trajectory))
        return place.result()

    def _hand_out(self) -> None:
        """Give what is free to those who have waited longest."""
        while self._queue:
            place, trajectory = self._queue[0]
            host = max(self._hosts, key=lambda host: host.room, default=None)
            if not place.done() and (host is None or not host.room):
                return
            self._queue.popleft()
            if host is not None and not place.done():
                place.set_result((host, host.take(trajectory)))

    async def _ask(self, host: Host, number: int, question: Message, limit_s: float) -> Message:
        """What the worker answers about an instance."""
        is_step = question["ask"] == "step"
        self._num_steps += is_step
        self._tool_time.run(self._num_steps > 0)
        try:
            answer = await host.link.ask(question | {"instance": number}, limit_s)
        except Frozen:
            self._num_timeouts += 1
            raise
        finally:
            self._num_steps -= is_step
            self._tool_time.run(self._num_steps > 0)
        if self._refusal is not None:
            raise EnvironmentLost(self._refusal)
        self._num_timeouts += sum(late for _, _, late in answer.get("answers", ())) + answer.get("timed_out", False)
        self._note(host, number, is_stuck=answer["is_stuck"])
        return answer

    def _note(self, host: Host, number: int, *, is_stuck: bool) -> None:
        """Whether a call in the instance goes on that cannot be ended."""
        if not is_stuck:
            host.stuck.discard(number)
        elif number not in host.stuck:
            if not host.stuck:
                self._spawn(self._end_after_grace(host))
            host.stuck.add(number)

    def _give_back(self, host: Host, number: int, broken: bool) -> None:
        """A trajectory does not need the instance any more."""
        del host.held[number]
        if host.link.is_over:
            return
        if broken or number in host.stuck:
            self._spawn(self._discard(host, number))
            return
        host.put_back(number)
        self._end_if_hopeless(host)
        self._hand_out()

    async def _discard(self, host: Host, number: int) -> None:
        """Close an instance; another one may take its place."""
        try:
            answer = await host.link.ask(_close_question(number), _CLOSE_LIMIT_S)
        except EnvironmentLost:
            return
        self._note(host, number, is_stuck=answer.get("is_stuck", False))
        if number not in host.stuck:
            host.forget(number)
        self._end_if_hopeless(host)
        self._hand_out()

    def _end_if_hopeless(self, host: Host) -> None:
        """A worker in which nothing goes on but what cannot be ended."""
        if host.stuck and not host.held:
            host.link.stop(_STUCK)

    async def _end_after_grace(self, host: Host) -> None:
        """What goes on may have ended by itself meanwhile."""
        await asyncio.sleep(self._limits.grace_s)
        try:
            answer = await host.link.ask({"ask": "stuck"}, _CLOSE_LIMIT_S)
        except EnvironmentLost:
            return
        for number in host.stuck - set(answer["stuck"]):
            host.stuck.discard(number)
            if number not in host.held:
                host.forget(number)
        if host.stuck:
            host.link.stop(_STUCK)
        self._hand_out()

    def _new_host(self, capacity: int) -> Host:
        link = Link(new_child(self._folders), lambda why: self._replace(host, why))
        host = Host(link, capacity)
        return host

    async def _load(self, host: Host) -> Description:
        description = description_in(await host.link.ask(load_question(self._specs, self._limits), START_LIMIT_S))
        host.is_ready = True
        return description

    def _replace(self, host: Host, why: str) -> None:
        """Another worker in place of one that has ended."""
        if host not in self._hosts or not host.is_ready:
            return
        self._hosts.remove(host)
        self._num_replaced += 1
        if self._num_replaced <= _LOGGED_LOSSES:
            names = ", ".join(sorted(name for name, _ in host.held.values())) or "none"
            _log.warning("a worker of the environments %s; trajectories in it: %.300s", why, names)
        self._spawn(self._start_again(host.capacity))

    async def _start_again(self, capacity: int) -> None:
        why: Exception | None = None
        for attempt in range(_STARTS_BEFORE_GIVING_UP):
            await asyncio.sleep(_PAUSE_BETWEEN_STARTS_S * attempt)
            host = self._new_host(capacity)
            self._hosts.append(host)
            try:
                await self._load(host)
            except (EnvironmentLost, ValueError) as err:
                why = err
                self._hosts.remove(host)
                host.link.end()
            else:
                self._hand_out()
                return
        self._refuse(_not_started(self._specs, f"{why}, {_STARTS_BEFORE_GIVING_UP} times in a row"))

    def _refuse(self, why: str) -> None:
        """Whoever waits for an environment, and who asks for one from now on, gets an error."""
        self._refusal = why
        for place, _ in self._queue:
            if not place.done():
                place.set_exception(RuntimeError(why))
        self._queue.clear()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _who_holds(self, trajectory: str) -> str:
        now = time.monotonic()
        held = sorted((since, name) for host in self._hosts for name, since in host.held.values())
        longest = ", ".join(f"{name} for {now - since:.0f} s" for since, name in held[:3]) or "nothing"
        return (
            f"no environment became free for {trajectory} within env_acquire_timeout={self._limits.acquire_timeout_s:g} s: "
            f"{len(held)} of pool_size={sum(self._capacities)} are held, the longest by {longest}; raise pool_size, or lower "
            "tool_timeout or trajectory_timeout"
        )

    def _reset_metrics(self) -> None:
        self._waits: list[float] = []
        self._num_replaced = self._num_timeouts = 0


def _close_question(number: int) -> Message:
    return {"ask": "close", "instance": number, "limit_s": _CLOSE_LIMIT_S}


def _not_started(specs: Sequence[Spec], why: str) -> str:
    entries = ", ".join(spec.entry for spec in specs)
    return f"a worker of the environments cannot be started with {entries}: {why}; its own message is on stderr"
