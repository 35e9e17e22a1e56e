"""An `Engine` with vLLM in a Ray actor."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol, TypeVar

from mgrpo.rollout.engine import GATHER_S, Completions, EngineError
from mgrpo.rollout.vllm.calls import Caller

T = TypeVar("T")


class RayReference(Protocol[T]):
    """Ray's reference to a result."""

    def future(self) -> Future[T]: ...


class Remote(Protocol[T]):
    """A method of Ray's actor handle."""

    def remote(self, *args: object) -> RayReference[T]: ...


class ActorHandle(Protocol):
    """Ray's handle of an `EngineActor`."""

    call: Remote[Any]
    poll: Remote[Completions]
    ping: Remote[None]


class RayEngine(Caller):
    """The caller's end of one `EngineActor`."""

    def __init__(
        self,
        actor: ActorHandle,
        starting: RayReference[None],
        *,
        cluster_failure: Callable[[], str | None] = lambda: None,
        end_process: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            starting: the result of the actor's `start`.
            end_process: ends the actor's process even if it hangs, which Ray's request does not.
            cluster_failure: the reason why Ray itself has failed, then the cause of an engine's error; None: it has not.
        """
        self.actor, self.cluster_failure, self.end_process = actor, cluster_failure, end_process
        self.turns = itertools.count()
        self.pending: set[Future[Any]] = set()
        self.refusal: str | None = None
        """Reason why the actor must not be called again."""
        self.lock = threading.Lock()
        """Held during calls of the actor and `close`: a call after the end would start another Ray cluster."""
        self.ready: Future[None] = self._answer(starting)

    def poll(self, gather_s: float = GATHER_S) -> Future[Completions]:
        """See `Engine`."""
        return self._remote(lambda: self.actor.poll.remote(gather_s))

    def ping(self) -> Future[None]:
        """See `Engine`."""
        return self._remote(lambda: self.actor.ping.remote())

    def fail(self, reason: str) -> None:
        """Fail all pending and later calls: Ray may never answer again."""
        with self.lock:
            self.refusal = self.refusal or reason
        for answer in list(self.pending):
            self._settle(answer, EngineError(reason))

    def close(self) -> None:
        """Kill the actor and its processes; calls without an answer fail, because Ray may never answer them."""
        import ray

        with self.lock:
            self.refusal = self.refusal or "the engine was closed"
            ray.kill(self.actor)
        self.end_process()
        self.fail(self.refusal)

    def _call(self, method: str, *args: object) -> Future[Any]:
        """A call that takes effect after those before it."""
        return self._remote(lambda: self.actor.call.remote(next(self.turns), method, *args))

    def _remote(self, call: Callable[[], RayReference[T]]) -> Future[T]:
        with self.lock:
            if self.refusal is None:
                return self._answer(call())
        refused: Future[T] = Future()
        refused.set_exception(EngineError(self.refusal))
        return refused

    def _answer(self, reference: RayReference[T]) -> Future[T]:
        """Future of a call of the actor; Ray's errors become an EngineError with the line of the cause."""
        answer: Future[T] = Future()
        self.pending.add(answer)

        def done(call: Future[T]) -> None:
            err = call.exception()
            failed = err is not None and EngineError(self.cluster_failure() or _cause(err))
            self._settle(answer, failed or call.result())

        reference.future().add_done_callback(done)
        return answer

    def _settle(self, answer: Future[Any], result: Any) -> None:
        self.pending.discard(answer)
        # The answer and the failure may come at once, from two threads.
        with contextlib.suppress(InvalidStateError):
            if isinstance(result, EngineError):
                answer.set_exception(result)
            else:
                answer.set_result(result)


def _cause(err: BaseException) -> str:
    """The last line of the message: Ray's messages contain whole tracebacks and guesses."""
    if type(err).__name__ == "ActorDiedError":
        return "its process has died"
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return f"{type(err).__name__}: {lines[-1] if lines else 'no message'}"
