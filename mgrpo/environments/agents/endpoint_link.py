"""The learner's side of the endpoint processes: sessions are opened and ended there, and their wishes come from there."""

from __future__ import annotations

import asyncio
import itertools
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
"""No agent asks anything while a policy is trained, however long that takes."""
_MAX_ANSWER_BYTES = 1 << 28
_RESTARTS = 3
"""Starts in a row that may fail before the run ends."""

Wish = Mapping[str, Any]
"""A turn that an agent wants, see `endpoint.process`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """How the run's endpoints serve."""

    language: LanguageSpec
    host: str = "127.0.0.1"
    port: int = 0
    """Of the first one, the next ones follow; 0: any."""
    public_url: str | None = None
    """Their common address for agents; None: each has its own."""
    max_turns: int = 1024
    sampling_conflict: str = "override"
    worker_key: str | None = field(default=None, repr=False)
    """The key of agents that ask for tasks; None: there are none."""
    join: tuple[str, int] | None = None
    """Where endpoints of other machines may join; None: none do."""
    join_secret: str = field(default="", repr=False)
    """What they must know."""


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
        """Wait until it is over, and how: "ended" as whoever has taken its task says, or "late", "lost" where
        nobody came, or "gone" where the worker that had its task is silent or has given it back.

        Raises:
            EnvironmentLost: its endpoint is gone.
        """
        answer = await self._endpoint.ask({"ask": "wait", "session": self.id}, _WISHES_LIMIT_S)
        return {"ended": answer["status"], **answer["left"]}

    async def answer(self, number: int, turn: Sampled) -> None:
        """Tell the agent what was sampled for a wish."""
        await self._tell(
            number,
            {
                "tokens": turn.tokens.tolist(),
                "logprobs": turn.logprobs.tolist(),
                "finish_reason": turn.finish_reason,
            },
        )

    async def refuse(self, number: int, why: str) -> None:
        """Tell the agent that nothing will be sampled any more."""
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
        """Work on a wish."""
        number = wish["number"]
        task = self._tasks[number] = asyncio.get_running_loop().create_task(self._on_wish(wish))
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def cancel(self, number: int) -> None:
        """Nobody waits for this turn any more."""
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    def lose(self, why: str) -> None:
        """Its endpoint is gone."""
        if not self.lost.done():
            self.lost.set_result(why)
        for task in self._tasks.values():
            task.cancel()

    async def _tell(self, number: int, answer: Message) -> None:
        await self._endpoint.ask({"ask": "sampled", "session": self.id, "number": number, **answer}, _ANSWER_LIMIT_S)


class Endpoints:
    """All endpoint processes of a run, for one asyncio loop. Always `close` them.

    One that ends is started again, if it is a child; its sessions are lost. Each knows the others, to pass calls on to them.
    """

    def __init__(self, settings: EndpointSettings, *, count: int = 1) -> None:
        """Starts nothing."""
        self._settings = settings
        self._all = [_Endpoint(settings, number, self._replace) for number in range(count)]
        self._numbers = itertools.count(count)
        self._door: Door | None = None
        self._losses = Losses()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusal: str | None = None
        self._changed = asyncio.Event()
        """Set when one serves that did not, or none will."""

    @property
    def urls(self) -> Sequence[str]:
        """The addresses of the processes, as they listen."""
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
        await self._introduce()
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
        """A session of a new trajectory, at the process that has the fewest; waits for one where all are being started again.

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
            if serving := [endpoint for endpoint in self._all if endpoint.is_serving]:
                return min(serving, key=lambda endpoint: endpoint.num_sessions)
            self._changed.clear()
            await self._changed.wait()
        raise RuntimeError(self._refusal)

    def _refuse(self, why: str) -> None:
        self._refusal = why
        self._changed.set()

    async def _introduce(self) -> None:
        """Tell all where the others are."""
        urls = {str(endpoint.number): endpoint.direct for endpoint in self._all if endpoint.direct}
        asked = [
            endpoint.ask({"ask": "peers", "urls": urls}, _ANSWER_LIMIT_S)
            for endpoint in self._all
            if endpoint.is_serving
        ]
        # One that is lost meanwhile is told otherwise.
        await asyncio.gather(*asked, return_exceptions=True)

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
            await self._introduce()

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
                await self._introduce()
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
        self._pump: asyncio.Task[None] | None = None
        self._is_loaded = False
        self.sessions: dict[str, Session] = {}
        self._num_opening = 0
        self.url = self.direct = ""

    @property
    def is_serving(self) -> bool:
        return self._link is not None and not self._link.is_over and self._is_loaded

    @property
    def num_sessions(self) -> int:
        """Those that are being opened included."""
        return len(self.sessions) + self._num_opening

    async def start(self) -> None:
        """Start the process, on the port of the one before it.

        Raises:
            EnvironmentLost: it has ended, or cannot listen there.
        """
        settings = self._settings
        port = settings.port and settings.port + self.number
        if self.direct:
            port = int(self.direct.rpartition(":")[2])
        self._is_loaded = False
        process = self._joined or Child(
            PROGRAM, environment=without_secrets("MGRPO_ENDPOINT_"), max_line_bytes=_MAX_ANSWER_BYTES
        )
        self._link = Link(process, self._over)
        question = {
            "ask": "load",
            "language": settings.language.to_json(),
            "host": settings.host,
            "port": port,
            "public_url": settings.public_url,
            "number": self.number,
            "limits": {"max_turns": settings.max_turns},
            "sampling_conflict": settings.sampling_conflict,
            "worker_key": settings.worker_key,
        }
        try:
            answer = await self.ask(question, _START_LIMIT_S)
        except BaseException:
            self._link.end()
            raise
        self.url, self.direct = answer["url"], answer["direct"]
        self._is_loaded = True
        self._pump = asyncio.get_running_loop().create_task(self._take_wishes())

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
        if self._is_loaded:  # Else its start has failed, which says so.
            self._when_over(self, why)

    def lose(self, why: str) -> None:
        if self._pump is not None:
            self._pump.cancel()
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            session.lose(why)

    def close(self) -> None:
        self.lose("it was closed")
        if self._link is not None:
            self._link.end()

    async def _take_wishes(self) -> None:
        while True:
            try:
                found = await self.ask({"ask": "wishes"}, _WISHES_LIMIT_S)
            except EnvironmentLost:
                return  # Its end is told otherwise.
            for wish in found["wishes"]:
                if (session := self.sessions.get(wish["session"])) is not None:
                    session.take(wish)
            for name, number in found["cancelled"]:
                if (session := self.sessions.get(name)) is not None:
                    session.cancel(number)
