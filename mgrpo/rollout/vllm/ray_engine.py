"""An `Engine` whose vLLM runs in a Ray actor."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol, TypeVar

from mgrpo.rollout.engine import Completions, EngineError, PromptBatch

T = TypeVar("T")


class Reference(Protocol[T]):
    """Ray's reference of a result."""

    def future(self) -> Future[T]: ...


class Remote(Protocol[T]):
    """A method of an actor, as Ray's handle offers it."""

    def remote(self, *args: object) -> Reference[T]: ...


class ActorHandle(Protocol):
    """Ray's handle of an `EngineActor`."""

    submit: Remote[None]
    take: Remote[Completions]
    abort: Remote[None]
    join: Remote[None]
    receive_weights: Remote[None]
    seed: Remote[None]


class RayEngine:
    """The caller's end of one `EngineActor`."""

    def __init__(self, actor: ActorHandle, starting: Reference[None]) -> None:
        """
        Args:
            starting: the result of the actor's `start`.
        """
        self.actor = actor
        self.pending: set[Future[Any]] = set()
        self.is_closed = False
        self.ready: Future[None] = self._answer(starting)

    def submit(self, batch: PromptBatch) -> None:
        """See `Engine`; a failure shows in `take`."""
        self.actor.submit.remote(batch)

    def take(self, number: int) -> Future[Completions]:
        """See `Engine`."""
        return self._answer(self.actor.take.remote(number))

    def abort(self) -> Future[None]:
        """See `Engine`."""
        return self._answer(self.actor.abort.remote())

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        """See `Engine`."""
        return self._answer(self.actor.join.remote(invitation))

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        """See `Engine`."""
        return self._answer(self.actor.receive_weights.remote(version, check, seed))

    def seed(self, seed: int) -> Future[None]:
        """See `Engine`."""
        return self._answer(self.actor.seed.remote(seed))

    def close(self) -> None:
        """Kill the actor and its processes; what has not been answered fails, because Ray may never answer it."""
        import ray

        self.is_closed = True
        ray.kill(self.actor)
        for answer in list(self.pending):
            self._settle(answer, EngineError("the engine was closed"))

    def _answer(self, reference: Reference[T]) -> Future[T]:
        """The result of a call of the actor; Ray's errors become an EngineError with the line that says what happened."""
        answer: Future[T] = Future()
        self.pending.add(answer)

        def done(call: Future[T]) -> None:
            err = call.exception()
            self._settle(answer, call.result() if err is None else EngineError(_cause(err)))

        reference.future().add_done_callback(done)
        if self.is_closed:
            self._settle(answer, EngineError("the engine was closed"))
        return answer

    def _settle(self, answer: Future[Any], result: Any) -> None:
        self.pending.discard(answer)
        # The answer and the closing may come at once, from two threads.
        with contextlib.suppress(InvalidStateError):
            if isinstance(result, EngineError):
                answer.set_exception(result)
            else:
                answer.set_result(result)


def _cause(err: BaseException) -> str:
    """The last line of the message: Ray prints whole tracebacks."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return f"{type(err).__name__}: {lines[-1] if lines else 'no message'}"
