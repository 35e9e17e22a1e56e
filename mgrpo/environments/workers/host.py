"""A worker process and the environments in it, and the trajectories that wait for one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from mgrpo.environments.loop.losses import EnvironmentLost
from mgrpo.environments.workers.link import Link
from mgrpo.processes.json_lines import Message
from mgrpo.processes.stopwatch import Stopwatch

_CLOSE_LIMIT_S = 5.0
_STUCK = "held a call that could not be ended, and was killed"
_IDLE_PACE = 0.1
"""Pace of the queue's clock while no request to an environment is open."""
_LEAST_WAIT_S = 0.05


class Tally:
    """Requests of trajectories to their environments, over all workers."""

    def __init__(self) -> None:
        self.asked_time, self.step_time = Stopwatch(), Stopwatch()
        """Running while any request is unanswered; running while any step is."""
        self.num_late = 0
        """Calls and resets that took too long, since the start."""
        self._num_asked = self._num_steps = 0

    @contextlib.contextmanager
    def asked(self, *, is_step: bool = False) -> Iterator[None]:
        """Context manager around one request to the worker."""
        self._count(1, is_step)
        try:
            yield
        finally:
            self._count(-1, is_step)

    def _count(self, change: int, is_step: bool) -> None:
        self._num_asked += change
        self._num_steps += change * is_step
        self.asked_time.run(self._num_asked > 0)
        self.step_time.run(self._num_steps > 0)


class Host:
    """The environments of one worker, at most `capacity`.

    A call that cannot be cancelled costs the worker: that takes no new trajectory, the others in it go on for a while, then it
    is killed.
    """

    def __init__(
        self,
        link: Link,
        capacity: int,
        *,
        tally: Tally,
        grace_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        when_free: Callable[[], None],
    ) -> None:
        """
        Args:
            grace_s: seconds that it may continue with a call that cannot be ended.
            spawn: starts work in the loop.
            when_free: called whenever there may be `room` again.
        """
        self.link, self.capacity, self.tally = link, capacity, tally
        self._grace_s, self._spawn, self._when_free = grace_s, spawn, when_free
        self.is_ready = self.is_closed = False
        """True once it has loaded; true once the pool has closed it."""
        self.held: dict[int, tuple[str, float]] = {}
        """Trajectory and its start time, by instance."""
        self.stuck: set[int] = set()
        """Instances with a call that cannot be ended; while there are any, the worker takes no new trajectory."""
        self._alive: set[int] = {0}
        self._idle: list[tuple[int, float]] = [(0, time.monotonic())]
        """Idle instances with the time since when, the longest idle first."""
        self._next = 1

    @property
    def room(self) -> int:
        """Number of further trajectories that it can serve."""
        if not self.is_ready or self.stuck or self.link.is_over:
            return 0
        return len(self._idle) + self.capacity - len(self._alive)

    @property
    def instances(self) -> list[int]:
        """Numbers of all instances that exist."""
        return sorted(self._alive)

    def take(self, trajectory: str) -> int:
        """An instance for the trajectory, idle or new."""
        if self._idle:
            number, _ = self._idle.pop()
        else:
            number, self._next = self._next, self._next + 1
            self._alive.add(number)
        self.held[number] = (trajectory, time.monotonic())
        return number

    def give_back(self, number: int, *, broken: bool, ends: bool = False) -> None:
        """Return a trajectory's instance; `ends`: its end has work to do."""
        del self.held[number]
        if self.link.is_over:
            return
        if broken or number in self.stuck:
            self._spawn(self._discard(number))
        elif ends:
            self._spawn(self._end(number))
        else:
            self._put_back(number)

    def close_idle(self, idle_s: float) -> None:
        """Close instances that have been idle for so long."""
        before = time.monotonic() - idle_s
        taken = [number for number, since in self._idle if since < before]
        del self._idle[: len(taken)]
        for number in taken:
            self._spawn(self._discard(number))

    def note(self, number: int, *, is_stuck: bool) -> None:
        """Record the instance as stuck in a call that cannot be ended, or as free again."""
        if not is_stuck and number in self.stuck:
            self.stuck.remove(number)
            self._when_free()
        elif is_stuck and number not in self.stuck:
            if not self.stuck:
                self._spawn(self._end_after_grace())
            self.stuck.add(number)

    async def close_instances(self) -> None:
        """Close the environments, for at most some seconds; the process is to be ended afterwards."""
        numbers = self.instances if self.is_ready and not self.link.is_over else []
        closing = [asyncio.ensure_future(self._ask_to_close(number)) for number in numbers]
        try:
            if closing:
                await asyncio.wait(closing, timeout=_CLOSE_LIMIT_S)
        finally:
            for answer in closing:
                answer.cancel()

    async def _ask_to_close(self, number: int) -> Message:
        question = {"ask": "close", "instance": number, "limit_s": _CLOSE_LIMIT_S}
        return await self.link.ask(question, _CLOSE_LIMIT_S)

    def _put_back(self, number: int) -> None:
        self._idle.append((number, time.monotonic()))
        self._end_if_hopeless()
        self._when_free()

    async def _end(self, number: int) -> None:
        """Release the resources that a trajectory left in the instance; until then it serves no other."""
        question = {"ask": "end", "instance": number, "limit_s": _CLOSE_LIMIT_S}
        try:
            with self.tally.asked():
                answer = await self.link.ask(question, _CLOSE_LIMIT_S)
        except EnvironmentLost:
            return
        self.note(number, is_stuck=answer["is_stuck"])
        if "error" in answer:
            await self._discard(number)
        else:
            self._put_back(number)

    async def _discard(self, number: int) -> None:
        """Close an instance; another one may take its place."""
        try:
            answer = await self._ask_to_close(number)
        except EnvironmentLost:
            return
        self.note(number, is_stuck=answer.get("is_stuck", False))
        if number not in self.stuck:
            self._forget(number)
        self._end_if_hopeless()
        self._when_free()

    def _end_if_hopeless(self) -> None:
        """Kill a worker that only has calls which cannot be ended."""
        if self.stuck and not self.held:
            self.link.stop(_STUCK)

    async def _end_after_grace(self) -> None:
        """Kill the worker after the grace, unless its stuck calls have ended by themselves meanwhile."""
        await asyncio.sleep(self._grace_s)
        try:
            answer = await self.link.ask({"ask": "stuck"}, _CLOSE_LIMIT_S)
        except EnvironmentLost:
            return
        for number in self.stuck - set(answer["stuck"]):
            self.stuck.discard(number)
            if number not in self.held:
                self._forget(number)
        if self.stuck:
            self.link.stop(_STUCK)
        self._when_free()

    def _forget(self, number: int) -> None:
        self._alive.discard(number)
        self.stuck.discard(number)


Place = tuple[Host, int]
"""A host, and the instance in it."""


class Queue:
    """Trajectories that wait for an environment: in order, and until none was given to any trajectory for too long.

    A long queue that moves is not a failure. Nor is one that stands still while environments are held and not asked anything: the
    model is sampled or trained then, and no environment is late. The clock is slow then, but does not stop: a wait has an end.
    For one event loop.
    """

    def __init__(self, timeout_s: float, asked_time: Stopwatch) -> None:
        """`asked_time`: runs while any request to an environment is open."""
        self._timeout_s, self._asked_time = timeout_s, asked_time
        self._waiting: deque[tuple[asyncio.Future[Place], str]] = deque()
        self._served_at = 0.0
        """The time by `_clock` at which a trajectory was last served."""

    @property
    def first(self) -> str | None:
        """The next trajectory to serve."""
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        return self._waiting[0][1] if self._waiting else None

    def join(self, trajectory: str, *, is_first: bool) -> asyncio.Future[Place]:
        """Wait behind all others, or before them."""
        place: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if is_first else self._waiting.append)((place, trajectory))
        return place

    def serve_first(self, place: Place) -> None:
        self._served_at = self._clock
        self._waiting.popleft()[0].set_result(place)

    def refuse(self, why: str) -> None:
        """Raise RuntimeError in all waiting trajectories."""
        for place, _ in self._waiting:
            if not place.done():
                place.set_exception(RuntimeError(why))
        self._waiting.clear()

    async def wait(self, place: asyncio.Future[Place]) -> None:
        """Wait until the place is given, or it takes too long."""
        since = self._clock
        while not place.done() and (left_s := max(since, self._served_at) + self._timeout_s - self._clock) > 0:
            await asyncio.wait({place}, timeout=max(left_s, _LEAST_WAIT_S))

    @property
    def _clock(self) -> float:
        return _IDLE_PACE * time.perf_counter() + (1 - _IDLE_PACE) * self._asked_time.seconds
