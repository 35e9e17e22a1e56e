"""Controller-side client of the endpoint processes: opens and ends sessions, receives sampling requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgrpo.environments.loop.losses import EnvironmentLost, Losses
from mgrpo.environments.loop.program_language import LanguageSpec
from mgrpo.environments.loop.trajectory import Sampled
from mgrpo.environments.workers.link import Link
from mgrpo.processes.distant import Distant, Door
from mgrpo.processes.json_lines import Child, Message
from mgrpo.processes.visible import without_secrets

PROGRAM = "mgrpo.environments.endpoint.process"
_START_LIMIT_S = 120.0
_ANSWER_LIMIT_S = 30.0
_WISHES_LIMIT_S = 7 * 86400.0
"""A wait for requests lasts as long as training, during which no agent makes any."""
_MAX_ANSWER_BYTES = 1 << 28
_RESTARTS = 3
"""Starts in a row that may fail before the run ends."""

_log = logging.getLogger(__name__)

Wish = Mapping[str, Any]
"""A sampling request of an agent, see `endpoint.process`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """Settings of the run's endpoints."""

    language: LanguageSpec
    host: str = "127.0.0.1"
    port: int = 0
    """Port of the first endpoint, with those of the others after it; 0: any."""
    public_url: str | None = None
    """Address for agents of a proxy that routes each session's calls to its endpoint; None: each endpoint has an address."""
    max_turns: int = 1024
    worker_key: str | None = field(default=None, repr=False)
    """The key of workers that request tasks; None: no such workers."""
    join: tuple[str, int] | None = None
    """Address to listen at for endpoints of other machines; None: they cannot join."""
    join_secret: str = field(default="", repr=False)
    """Secret of the joining endpoints."""


class Session:
    """One trajectory at an endpoint. Always `end` it."""

    def __init__(
        self, endpoint: _Endpoint, opened: Message, on_wish: Callable[[Wish], Coroutine[Any, Any, None]]
    ) -> None:
        self._endpoint, self._on_wish = endpoint, on_wish
        self.id: str = opened["session"]
        self.base_url: str = opened["base_url"]
        self.api_key: str = opened["api_key"]
        self.reward_key: str = opened["reward_key"]
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done with the reason when its endpoint is gone."""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def wait(self) -> Mapping[str, Any]:
        """Wait for the end of the session. "ended" in the result: as its worker reports, or "late", "lost" if no worker
        took its task, or "gone" if its worker stopped responding or returned the task.

        Raises:
            EnvironmentLost: its endpoint is gone.
        """
        answer = await self._endpoint.ask({"ask": "wait", "session": self.id}, _WISHES_LIMIT_S)
        return {"ended": answer["status"], **answer["left"]}

    async def answer(self, number: int, turn: Sampled) -> None:
        """Send the agent the turn sampled for a request."""
        await self._tell(
            number,
            {
                "tokens": turn.tokens.tolist(),
                "logprobs": turn.logprobs.tolist(),
                "finish_reason": turn.finish_reason,
            },
        )

    async def refuse(self, number: int, why: str) -> None:
        """Refuse an agent's request and all later ones: sampling has ended."""
        await self._tell(number, {"error": why, "is_over": True})

    async def end(self) -> Message:
        """End it: calls that are open are cancelled, and no further one is taken. Returns its report, see `Session.report` there.

        Raises:
            EnvironmentLost: its endpoint is gone.
        """
        self._endpoint.sessions.pop(self.id, None)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await self._endpoint.ask({"ask": "end", "session": self.id}, _ANSWER_LIMIT_S)

    def take(self, wish: Wish) -> None:
        """Start a task for a sampling request."""
        number = wish["number"]
        task = self._tasks[number] = asyncio.get_running_loop().create_task(self._on_wish(wish))
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def cancel(self, number: int) -> None:
        """Cancel a turn whose client disconnected."""
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    def lose(self, why: str) -> None:
        """Mark its endpoint as gone and cancel its tasks."""
        if not self.lost.done():
            self.lost.set_result(why)
        for task in self._tasks.values():
            task.cancel()

    async def _tell(self, number: int, answer: Message) -> None:
        await self._endpoint.ask({"ask": "sampled", "session": self.id, "number": number, **answer}, _ANSWER_LIMIT_S)


class Endpoints:
    """All endpoint processes of a run, for one asyncio loop. Always `close` them.

    One that ends is started again, if it is a child; its sessions are lost.
    """

    def __init__(self, settings: EndpointSettings, *, count: int = 1) -> None:
        """Store the settings; `start` starts the processes."""
        self._settings = settings
        self._all = [_Endpoint(settings, number, self._replace) for number in range(count)]
        self._numbers = itertools.count(count)
        self._door: Door | None = None
        self._losses = Losses()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusal: str | None = None
        self._changed = asyncio.Event()
        """Set when another process serves, or none will."""

    @property
    def urls(self) -> Sequence[str]:
        """The addresses of the processes for agents."""
        return [endpoint.url for endpoint in self._all]

    async def start(self) -> None:
        """Start the processes; returns when they serve.

        Raises:
            ValueError: one cannot be started.
        """
        try:
            await asyncio.gather(*(endpoint.start() for endpoint in self._all))
        except EnvironmentLost as err:
            await self.close()
            raise ValueError(f"the endpoint of agents cannot be started: {err}; its own message is on stderr") from err
        if self._settings.join is not None:
            await self._open_door(self._settings.join)

    async def close(self) -> None:
        """End the processes at once."""
        self._refuse("the endpoint of agents is closed")
        for task in self._tasks:
            task.cancel()
        if self._door is not None:
            await self._door.close()
        for endpoint in self._all:
            endpoint.close()

    async def open(self, bounds: Mapping[str, Any], on_wish: Callable[[Wish], Coroutine[Any, Any, None]]) -> Session:
        """A session of a new trajectory, at the process that has the fewest, with workers among those that a worker has asked
        for tasks, if there are any; waits for one where all are being started again.

        Args:
            bounds: the fields of `open`, see `endpoint.process`.
            on_wish: samples a turn and answers it.
        Raises:
            EnvironmentLost: the process has ended.
            RuntimeError: the endpoints are closed, or cannot be started again.
        """
        endpoint = await self._least_busy()
        return await endpoint.open(bounds, on_wish)

    async def _least_busy(self) -> _Endpoint:
        while self._refusal is None:
            # Workers have fixed addresses: a task at an endpoint that none of them asks would be lost.
            known = [endpoint for endpoint in self._all if endpoint.is_asked] or self._all
            if serving := [endpoint for endpoint in known if endpoint.is_serving]:
                return min(serving, key=lambda endpoint: endpoint.num_sessions)
            self._changed.clear()
            await self._changed.wait()
        raise RuntimeError(self._refusal)

    def _refuse(self, why: str) -> None:
        self._refusal = why
        self._changed.set()

    async def _open_door(self, address: tuple[str, int]) -> None:
        try:
            listener = socket.create_server(address)
        except OSError as err:
            await self.close()
            name = ":".join(map(str, address))
            raise ValueError(
                f"agent_endpoint_join={name} cannot be opened: {err.strerror}; choose another address"
            ) from err
        self._door = Door(
            listener,
            secret=self._settings.join_secret,
            on_joined=lambda distant: self._begin(self._take_in(distant)),
            max_line_bytes=_MAX_ANSWER_BYTES,
        )

    async def _take_in(self, distant: Distant) -> None:
        """Let a process of another machine serve as well."""
        endpoint = _Endpoint(self._settings, next(self._numbers), self._forget, joined=distant)
        try:
            await endpoint.start()
        except EnvironmentLost as err:
            self._losses.say("joining", f"an endpoint of agents at {distant.host} cannot serve: {err}")
        else:
            self._all.append(endpoint)
            self._changed.set()
            if self._settings.worker_key is not None:
                _log.warning(
                    "an endpoint of agents has joined; while workers ask only others, it is given no trajectories; add to them --url %s",
                    endpoint.url,
                )

    def _forget(self, endpoint: _Endpoint, why: str) -> None:
        self._lose(endpoint, why)
        self._all.remove(endpoint)

    def _replace(self, endpoint: _Endpoint, why: str) -> None:
        self._lose(endpoint, why)
        self._begin(self._start_again(endpoint))

    def _lose(self, endpoint: _Endpoint, why: str) -> None:
        self._losses.say(
            "endpoint", f"the endpoint of agents {why}; trajectories that it served: {len(endpoint.sessions)}"
        )
        endpoint.lose(why)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_again(self, endpoint: _Endpoint) -> None:
        why: EnvironmentLost | None = None
        for attempt in range(_RESTARTS):
            await asyncio.sleep(attempt)
            try:
                await endpoint.start()
            except EnvironmentLost as err:
                why = err
            else:
                self._changed.set()
                return
        self._refuse(f"the endpoint of agents cannot be started again: {why}")


class _Endpoint:
    """One process."""

    def __init__(
        self,
        settings: EndpointSettings,
        number: int,
        when_over: Callable[[_Endpoint, str], None],
        *,
        joined: Distant | None = None,
    ) -> None:
        """`joined`: the process; None: a child, which `start` starts."""
        self._settings, self.number, self._when_over, self._joined = settings, number, when_over, joined
        self._link: Link | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._is_loaded = False
        self.is_asked = False
        """True once a worker has asked it for a task."""
        self.sessions: dict[str, Session] = {}
        self._num_opening = 0
        self.url = ""
        self._port = settings.port and settings.port + number

    @property
    def is_serving(self) -> bool:
        return self._link is not None and not self._link.is_over and self._is_loaded

    @property
    def num_sessions(self) -> int:
        """Open sessions and those being opened."""
        return len(self.sessions) + self._num_opening

    async def start(self) -> None:
        """Start the process, on the port of the one before it.

        Raises:
            EnvironmentLost: it has ended, or cannot listen there.
        """
        settings = self._settings
        self._is_loaded = False
        process = self._joined or Child(
            PROGRAM, environment=without_secrets("MGRPO_ENDPOINT_"), max_line_bytes=_MAX_ANSWER_BYTES
        )
        self._link = Link(process, self._over)
        question = {
            "ask": "load",
            "language": settings.language.to_json(),
            "host": settings.host,
            "port": self._port,
            "public_url": settings.public_url,
            "number": self.number,
            "limits": {"max_turns": settings.max_turns},
            "worker_key": settings.worker_key,
        }
        try:
            answer = await self.ask(question, _START_LIMIT_S)
        except BaseException:
            self._link.end()
            raise
        self.url, self._port = answer["url"], answer["port"]
        self._is_loaded = True
        loop = asyncio.get_running_loop()
        self._pumps = [loop.create_task(self._take_wishes())]
        if settings.worker_key is not None:
            self._pumps.append(loop.create_task(self._wait_for_worker()))

    async def open(self, bounds: Mapping[str, Any], on_wish: Callable[[Wish], Coroutine[Any, Any, None]]) -> Session:
        self._num_opening += 1
        try:
            session = Session(self, await self.ask({"ask": "open", **bounds}, _ANSWER_LIMIT_S), on_wish)
        finally:
            self._num_opening -= 1
        self.sessions[session.id] = session
        return session

    async def ask(self, question: Message, limit_s: float) -> Message:
        """The process's answer.

        Raises:
            EnvironmentLost: it has ended, or cannot answer.
        """
        assert self._link is not None, "it is started first"
        answer = await self._link.ask(question, limit_s)
        if "error" in answer:
            raise EnvironmentLost(f"the endpoint of agents cannot answer {question['ask']}: {answer['error']}")
        return answer

    def _over(self, why: str) -> None:
        if self._is_loaded:  # Else its start fails with the reason.
            self._when_over(self, why)

    def lose(self, why: str) -> None:
        for pump in self._pumps:
            pump.cancel()
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            session.lose(why)

    def close(self) -> None:
        self.lose("it was closed")
        if self._link is not None:
            self._link.end()

    async def _wait_for_worker(self) -> None:
        with contextlib.suppress(EnvironmentLost):  # Its end is reported elsewhere.
            await self.ask({"ask": "worker"}, _WISHES_LIMIT_S)
            self.is_asked = True

    async def _take_wishes(self) -> None:
        while True:
            try:
                found = await self.ask({"ask": "wishes"}, _WISHES_LIMIT_S)
            except EnvironmentLost:
                return  # Its end is reported elsewhere.
            for wish in found["wishes"]:
                if (session := self.sessions.get(wish["session"])) is not None:
                    session.take(wish)
            for name, number in found["cancelled"]:
                if (session := self.sessions.get(name)) is not None:
                    session.cancel(number)
