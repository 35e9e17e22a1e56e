"""The workers of a pool, and which of their environments serves whom.

What hangs or dies is replaced. A call that cannot be cancelled costs its worker: that takes no new trajectory, the others
in it go on for a while, then it is killed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from mgrpo.environments.offered.catalog import Description, Spec
from mgrpo.environments.workers.errors import AcquireTimeout, EnvironmentLost, Frozen
from mgrpo.environments.workers.host import START_LIMIT_S, Host, description_in, load_question
from mgrpo.environments.workers.limits import WorkerLimits
from mgrpo.environments.workers.link import Link, new_child
from mgrpo.environments.workers.losses import Losses
from mgrpo.environments.workers.queue import Queue
from mgrpo.processes.json_lines import Message

_CLOSE_LIMIT_S = 5.0
_STARTS_BEFORE_GIVING_UP = 3
_PAUSE_BETWEEN_STARTS_S = 1.0
_STUCK = "held a call that could not be ended, and was killed"


class Workers:
    """All workers; for one asyncio loop at a time."""

    def __init__(
        self,
        specs: Sequence[Spec],
        capacities: Sequence[int],
        limits: WorkerLimits,
        *,
        folders: Sequence[str],
        python: str | None,
    ) -> None:
        """`capacities`: how many environments each worker may hold."""
        self._specs, self._capacities, self._limits = specs, capacities, limits
        self._folders, self._python = folders, python
        self._hosts: list[Host] = []
        self._queue = Queue(limits.acquire_timeout_s)
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
        self._spawn(self._close_idle())
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
        place = self._queue.join(trajectory, is_first=is_first)
        self._hand_out()
        try:
            await self._queue.wait(place)
        except asyncio.CancelledError:
            if not place.cancel() and place.exception() is None:
                self.give_back(*place.result(), broken=False)
            raise
        if not place.done():
            place.cancel()
            raise AcquireTimeout(_not_free(trajectory, self._hosts, sum(self._capacities), self._limits))
        return place.result()

    async def ask(self, host: Host, number: int, question: Message, limit_s: float) -> Message:
        """What the worker answers about an instance.

        Raises:
            EnvironmentLost: it does not.
        """
        try:
            with self._queue.asking():
                answer = await host.link.ask(question | {"instance": number}, limit_s)
        except Frozen as err:
            if host.stuck - {number}:
                raise EnvironmentLost("another trajectory's call froze the environment's worker") from err
            raise
        if self._is_closing:
            raise EnvironmentLost("the environments are closed")
        self._note(host, number, is_stuck=answer["is_stuck"])
        return answer

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
        while (trajectory := self._queue.first) is not None:
            host = max(self._hosts, key=lambda host: host.room, default=None)
            if host is None or not host.room:
                return
            self._queue.serve_first((host, host.take(trajectory)))

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

    async def _close_idle(self) -> None:
        """The most that were ever needed at once, as by an evaluation, are not kept for the whole run."""
        while True:
            await asyncio.sleep(self._limits.idle_s / 2)
            for host in self._hosts:
                for number in host.take_idle(self._limits.idle_s):
                    self._spawn(self._discard(host, number))

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
        host = Host(Link(new_child(self._folders, self._python), lambda why: self._replace(host, why)), capacity)
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
        self._queue.refuse(why)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _close_question(number: int) -> Message:
    return {"ask": "close", "instance": number, "limit_s": _CLOSE_LIMIT_S}


def _not_free(trajectory: str, hosts: Sequence[Host], pool_size: int, limits: WorkerLimits) -> str:
    now = time.monotonic()
    held = sorted((since, name) for host in hosts for name, since in host.held.values())
    longest = ", ".join(f"{name} for {now - since:.0f} s" for since, name in held[:3]) or "nothing"
    return (
        f"no environment became free for {trajectory} within env_acquire_timeout={limits.acquire_timeout_s:g} s: {len(held)} of "
        f"pool_size={pool_size} are held, the longest by {longest}; raise pool_size, or lower tool_timeout or trajectory_timeout"
    )


def not_started(specs: Sequence[Spec], why: str) -> str:
    entries = ", ".join(spec.entry for spec in specs)
    return f"a worker of the environments cannot be started with {entries}: {why}; its own message is on stderr"
