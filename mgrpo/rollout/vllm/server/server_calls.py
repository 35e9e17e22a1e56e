"""Base of the calls of an engine that is a vLLM server, over its HTTP endpoints."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from mgrpo.config.schema import Config
from mgrpo.rollout.engine import EngineError
from mgrpo.rollout.vllm.calls import EngineCalls
from mgrpo.rollout.vllm.server.server_connection import TOKEN, ServerConnection, ServerRefusal

REQUESTS = 512
"""Most prompts in a server at a time, each over a connection of its own: several times as many as it samples at once."""
RETRY_S = 1.0
RETURN_S = 5.0
"""Seconds before a failed server is tried again."""
HEALTH_EVERY_S = 5.0
HEALTH_TIMEOUT_S = 30.0
LEAVE_S = 10.0


class ServerError(EngineError):
    """The server cannot serve this run.

    Args:
        problems: one sentence each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ServerCalls(EngineCalls):
    """One server, which keeps running after the run. Requests and checks differ by its purpose, see the subclasses."""

    setting = "vllm_server_base_url"
    """Setting with the server's address."""
    token = TOKEN
    """Variable with the token of every request."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.connection = ServerConnection(url, token=self.token)
        self.room = asyncio.Semaphore(REQUESTS)
        self.vocab = 0
        """Size of the vocabulary; an answer's token ids are below."""
        self.health_timeout_s = HEALTH_TIMEOUT_S
        self.dead: EngineError | None = None
        self.watching: asyncio.Task[None] | None = None

    @property
    def place_of_url(self) -> str:
        """The server's setting and address, for the beginning of a sentence."""
        return f"{self.setting}={self.url}"

    async def start(self, config: Config, *, before: ServerCalls | None = None) -> None:
        """Wait for the server, and check that it can serve the run.

        Args:
            before: the calls of this run's earlier engine on the server, which has failed.

        Raises:
            ServerError: the server does not answer within `vllm_server_timeout` seconds, or cannot serve the run.
        """
        self.health_timeout_s = max(HEALTH_TIMEOUT_S, config.engine.engine_heartbeat_timeout)
        if before is not None:
            await asyncio.sleep(RETURN_S)
        await self._wait(config.engine.vllm_server_timeout)
        try:
            problems = await self._problems(config)
        except ServerError:
            raise
        except EngineError as err:
            problems = [str(err)]
        if problems:
            raise ServerError([f"{self.place_of_url}: {problem}" for problem in problems])
        self.watching = asyncio.create_task(self._watch())

    @abstractmethod
    async def _problems(self, config: Config) -> list[str]:
        """Problems that keep the server from serving the run."""

    async def leave(self) -> None:
        """Release the server."""
        await self.connection.close()

    async def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self.connection.get("/health", timeout_s=HEALTH_TIMEOUT_S)
                return
            except ServerRefusal as err:
                # 503: its engine has died; a proxy answers with the others while it starts.
                if err.status not in (502, 503, 504):
                    raise ServerError([f"{self.place_of_url}: {self._answer(err)}"]) from err
                reason = "its engine has died; restart it" if err.status == 503 else f"{self._answer(err)}; start it"
            except EngineError as err:
                reason = f"{err}; start it, or correct the address"
            if time.monotonic() > deadline:
                raise ServerError(
                    [
                        f"{self.place_of_url}: no vLLM server is ready there within "
                        f"vllm_server_timeout={timeout_s:g} s: {reason}"
                    ]
                )
            await asyncio.sleep(RETRY_S)

    async def _known(self, path: str, *, remedy: str) -> Any:
        try:
            return await self.connection.get(path)
        except ServerRefusal as err:
            if err.status == 404:
                raise ServerError([f"{self.place_of_url}: the server has no {path}; {remedy}"]) from err
            raise ServerError([f"{self.place_of_url}: {self._answer(err)}"]) from err

    async def ping(self) -> None:
        """Return when the server has answered that its engine is healthy."""
        if self.dead is not None:
            raise self.dead
        await self.connection.get("/health", timeout_s=self.health_timeout_s)

    async def _watch(self) -> None:
        """Poll the server's health, and set `dead` once it no longer answers."""
        while self.dead is None:
            await asyncio.sleep(HEALTH_EVERY_S)
            try:
                await self.connection.get("/health", timeout_s=self.health_timeout_s)
            except EngineError as err:
                self.dead = EngineError(f"the server does not answer any more: {err}")

    def _death(self) -> BaseException | None:
        return self.dead

    def _answer(self, err: ServerRefusal) -> str:
        """Clause with the remedy for an answer that a vLLM server would not give."""
        if err.status in (401, 403):
            return f"the server refuses the request ({err}); set {self.token} in the environment to its token"
        return f"what answers there is not a vLLM server, or a proxy lets too little through ({err})"
