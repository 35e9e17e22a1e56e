"""An `Engine` that is a vLLM server, started by others, which keeps running after the run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from mgrpo.config.schema import Config
from mgrpo.rollout.engine import GATHER_S, Completions, EngineError, WrongAnswerError
from mgrpo.rollout.vllm.calls import Caller
from mgrpo.rollout.vllm.server.policy_server import PolicyServer
from mgrpo.rollout.vllm.server.server_calls import LEAVE_S, ServerCalls

T = TypeVar("T")


class HttpEngine(Caller):
    """The caller's end of one server; its calls run in a thread of their own.

    Once the server has died, every call fails. The server may return: another HttpEngine waits for it, and then needs weights.
    """

    def __init__(
        self,
        url: str,
        config: Config,
        *,
        before: HttpEngine | None = None,
        make: Callable[[str], ServerCalls] = PolicyServer,
    ) -> None:
        """
        Args:
            url: address of the server without a path: `http://HOST:PORT`.
            before: the run's earlier engine on this server, which has failed.
            make: builds its calls.
        """
        self.url = url
        self.turns = itertools.count()
        self.refusal: str | None = None
        """Reason why the server must not be called again."""
        self.lock = threading.Lock()
        """Held while a call begins, and during `close`."""
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=f"server {url}", daemon=True)
        self.thread.start()
        self.calls: ServerCalls = asyncio.run_coroutine_threadsafe(_made(make, url), self.loop).result()
        self.ready: Future[None] = self._begin(self.calls.start(config, before=before.calls if before else None))

    def poll(self, gather_s: float = GATHER_S) -> Future[Completions]:
        """See `Engine`."""
        return self._begin(self.calls.poll(gather_s))

    def sleep(self) -> Future[None]:
        """Not supported: a server's devices are its own."""
        raise NotImplementedError("servers share no device with learners")

    def ping(self) -> Future[None]:
        """See `Engine`."""
        return self._begin(self.calls.ping())

    def close(self) -> None:
        """Release the server, see `ServerCalls.leave`; unanswered calls fail."""
        with self.lock:
            if self.refusal is not None:
                return
            self.refusal = "the engine was closed"
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._leave(), self.loop).result(2 * LEAVE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LEAVE_S)

    async def _leave(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.calls.leave()

    def _call(self, method: str, *args: object) -> Future[Any]:
        """A call that takes effect after those before it."""
        with self.lock:
            return self._begin_locked(self.calls.call(next(self.turns), method, *args))

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self.lock:
            return self._begin_locked(work)

    def _begin_locked(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self.refusal is None:
            return asyncio.run_coroutine_threadsafe(self._answer(work), self.loop)
        work.close()
        refused: Future[T] = Future()
        refused.set_exception(EngineError(self.refusal))
        return refused

    async def _answer(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a call; every error becomes an EngineError that names the server."""
        try:
            return await work
        except asyncio.CancelledError as err:
            raise EngineError(self.refusal or "the call was cancelled") from err
        except EngineError as err:
            if str(err).startswith(self.calls.place_of_url):
                raise
            kind = WrongAnswerError if isinstance(err, WrongAnswerError) else EngineError
            raise kind(f"server {self.url}: {err}") from err
        except Exception as err:
            raise EngineError(f"server {self.url}: {type(err).__name__}: {err}") from err


async def _made(make: Callable[[str], ServerCalls], url: str) -> ServerCalls:
    return make(url)
