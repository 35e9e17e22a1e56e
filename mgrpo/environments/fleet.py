"""The workers of a pool, and which of their environments serves whom.

What hangs or dies is replaced. A call that cannot be cancelled costs its worker: that takes no new trajectory, the others
in it go on for a while, then it is killed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from mgrpo.environments.catalog import Description, Spec
from mgrpo.environments.errors import AcquireTimeout, EnvironmentLost, Frozen
from mgrpo.environments.host import START_LIMIT_S, Host, description_in, load_question
from mgrpo.environments.limits import Limits
from mgrpo.environments.link import Link, new_child
from mgrpo.environments.losses import Losses
from mgrpo.processes.json_lines import Message
from mgrpo.processes.stopwatch import Stopwatch

_CLOSE_LIMIT_S = 5.0
_STARTS_BEFORE_GIVING_UP = 3
_PAUSE_BETWEEN_STARTS_S = 1.0
_IDLE_PACE = 0.1
"""Of the clock of those who wait for an environment, while no environment is asked anything."""
_LEAST_WAIT_S = 0.05
_STUCK = "held a call that could not be ended, and was killed"


class Fleet:
    """All workers; for one asyncio loop at a time."""

    def __init__(
        self,
        specs: Sequence[Spec],
        capacities: Sequence[int],
        limits: Limits,
        *,
        folders: Sequence[str],
        python: str | None,
    ) -> None:
        """`capacities`: how many environments each worker may hold."""
        self._specs, self._capacities, self._limits = specs, capacities, limits
        self._folders, self._python = folders, python
        self._hosts: list[Host] = []
        self._queue: deque[tuple[asyncio.Future[tuple[Host, int]], str]] = deque()
        self._given_at = 0.0
        """By `_clock`, when an environment was last given to somebody."""
        self._num_asked = 0
        """Questions that are not answered yet."""
        self._asked_time = Stopwatch()
        """Runs while there are any."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusal: str | None = "the environments are not started"
        """Why nothing is given to anybody."""
        self._is_closing = False
        self._losses = Losses()
        self.num_replaced = 0
        """Workers, since the start."""

    @property
    def pids(self) -> list[int]:
        return [host.link.pid for host in self._hosts]

    async def start(self) -> Description:
        """Start the workers.

        Raises:
            ValueError: an environment cannot be built or set up; the message names its entry.
        """
        assert not self._hosts, "it is started once, and again after it is closed"
        self._is_closing = False
        try:
            for capacity in self._capacities:
                self._new_host(capacity)
            descriptions = await asyncio.gather(*map(self._load, self._hosts))
        except EnvironmentLost as err:
            await self.close()
            raise ValueError(not_started(self._specs, str(err))) from err
        except BaseException:
            await self.close()
            raise
        self._refusal = None
        return descriptions[0]

    async def close(self) -> None:
        """End everything, within seconds whatever tools do; whoever waits for an answer gets an EnvironmentLost."""
        self._is_closing = True
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
            for answer in closing:
                answer.cancel()
            for host in hosts:
                host.link.end()

    async def place(self, trajectory: str, *, is_first: bool = False) -> tuple[Host, int]:
        """An instance that is idle or may be made, reserved for the trajectory; in the order of the requests.

        Args:
            is_first: before all others. Who had one that could not begin would otherwise wait behind a group of trajectories
                that waits for its own.
        Raises:
            AcquireTimeout: there is none in time.
            RuntimeError: nothing is given to anybody.
        """
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        place: asyncio.Future[tuple[Host, int]] = asyncio.get_running_loop().create_future()
        (self._queue.appendleft if is_first else self._queue.append)((place, trajectory))
        self._hand_out()
        try:
            await self._wait_for(place)
        except asyncio.CancelledError:
            if not place.cancel() and place.exception() is None:
                self.give_back(*place.result(), broken=False)
            raise
        if not place.done():
            place.cancel()
            raise AcquireTimeout(self._who_holds(trajectory))
        return place.result()

    async def _wait_for(self, place: asyncio.Future[tuple[Host, int]]) -> None:
        """Until it is done, or nothing was given to anybody for too long: a long queue that moves is no failure."""
        limit_s, since = self._limits.acquire_timeout_s, self._clock
        while not place.done() and (left_s := max(since, self._given_at) + limit_s - self._clock) > 0:
            await asyncio.wait({place}, timeout=max(left_s, _LEAST_WAIT_S))

    @property
    def _clock(self) -> float:
        """Slow while environments are held and not asked: the model is sampled or trained then, and no environment is late."""
        return _IDLE_PACE * time.perf_counter() + (1 - _IDLE_PACE) * self._asked_time.seconds

    async def ask(self, host: Host, number: int, question: Message, limit_s: float) -> Message:
        """What the worker answers about an instance.

        Raises:
            EnvironmentLost: it does not.
        """
        self._count_asked(1)
        try:
            answer = await host.link.ask(question | {"instance": number}, limit_s)
        except Frozen as err:
            if host.stuck - {number}:
                raise EnvironmentLost("another trajectory's call froze the environment's worker") from err
            raise
        finally:
            self._count_asked(-1)
        if self._is_closing:
            raise EnvironmentLost("the environments are closed")
        self._note(host, number, is_stuck=answer["is_stuck"])
        return answer

    def _count_asked(self, change: int) -> None:
        self._num_asked += change
        self._asked_time.run(self._num_asked > 0)

    def give_back(self, host: Host, number: int, *, broken: bool, ends: bool = False) -> None:
        """A trajectory does not need the instance any more; `ends`: which has something to do then."""
        del host.held[number]
        if host.link.is_over:
            return
        if broken or number in host.stuck:
            self._spawn(self._discard(host, number))
        elif ends:
            self._spawn(self._end(host, number))
        else:
            self._put_back(host, number)

    def _put_back(self, host: Host, number: int) -> None:
        host.put_back(number)
        self._end_if_hopeless(host)
        self._hand_out()

    async def _end(self, host: Host, number: int) -> None:
        """Have the instance let go of what its trajectory left; it serves no other one before."""
        question = {"ask": "end", "limit_s": _CLOSE_LIMIT_S}
        try:
            answer = await self.ask(host, number, question, _CLOSE_LIMIT_S)
        except EnvironmentLost:
            return
        if "error" in answer:
            await self._discard(host, number)
        else:
            self._put_back(host, number)

    def _hand_out(self) -> None:
        """Give what is free to those who have waited longest."""
        while self._queue:
            place, trajectory = self._queue[0]
            host = max(self._hosts, key=lambda host: host.room, default=None)
            if not place.done() and (host is None or not host.room):
                return
            self._queue.popleft()
            if host is not None and not place.done():
                self._given_at = self._clock
                place.set_result((host, host.take(trajectory)))

    def _note(self, host: Host, number: int, *, is_stuck: bool) -> None:
        """Whether a call in the instance goes on that cannot be ended."""
        if not is_stuck and number in host.stuck:
            host.stuck.remove(number)
            self._hand_out()
        elif is_stuck and number not in host.stuck:
            if not host.stuck:
                self._spawn(self._end_after_grace(host))
            host.stuck.add(number)

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
        link = Link(new_child(self._folders, self._python), lambda why: self._replace(host, why))
        host = Host(link, capacity)
        self._hosts.append(host)
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
        self.num_replaced += 1
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
        self._refuse(not_started(self._specs, f"{why}, {_STARTS_BEFORE_GIVING_UP} times in a row"))

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


def _close_question(number: int) -> Message:
    return {"ask": "close", "instance": number, "limit_s": _CLOSE_LIMIT_S}


def not_started(specs: Sequence[Spec], why: str) -> str:
    entries = ", ".join(spec.entry for spec in specs)
    return f"a worker of the environments cannot be started with {entries}: {why}; its own message is on stderr"
