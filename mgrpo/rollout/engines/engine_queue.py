"""Queue of requests to the engines of one model.

One thread owns the state of all requests; every answer of an engine is posted to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from mgrpo.processes.background import Background
from mgrpo.rollout.engine import GATHER_S, Completions, Engine, EngineError, PromptBatch, RefusedError
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.loads import Loads, Work
from mgrpo.rollout.engines.roster import listed, say
from mgrpo.rollout.engines.urgency_queue import UrgencyQueue

MOST_POLLS_PER_S = 1000
"""Polls per second, of all engines, that one thread can handle besides its other work."""


class QueuedWork(Work, Protocol):
    """A queued request; its callbacks run in the queue's thread."""

    @property
    def name(self) -> str:
        """Name of the request in messages."""

    @property
    def batch_key(self) -> Hashable:
        """Key that is equal for all requests of a batch."""

    @property
    def done(self) -> Callable[[Any], None]:
        """Called with the answer."""

    @property
    def failed(self) -> Callable[[Exception], None]:
        """Called instead of `done` on failure; a RefusedError concerns this request alone."""


R = TypeVar("R", bound=QueuedWork)


class EngineQueue(ABC, Generic[R]):
    """Sends each request to the engine with the least load, and again to another if that one fails. An `EngineListener`.

    Methods run in the thread unless noted.
    """

    verb = "generate"
    """The engines' work in error messages."""

    def __init__(self, fleet: Fleet, thread: Background, *, samples_per_engine: int | None = None) -> None:
        """
        Args:
            samples_per_engine: most samples in an engine at a time; others wait here, and can still go to any engine. None: no limit,
                so that an engine's samples depend on nothing but the prompts.
        """
        self.fleet, self.thread = fleet, thread
        self.loads: Loads[R] = Loads(samples_per_engine, on_change=self._load_changed)
        self.polled: set[int] = set()
        """Engines with an unanswered poll."""
        self.waiting: UrgencyQueue[R] = UrgencyQueue()
        self.withdrawn: set[R] = set()
        """Cancelled requests that engines still have."""
        self.is_sampling = False
        """False while the engines are paused."""
        fleet.roster.listen(self)

    @abstractmethod
    def _batch(self, numbered: Sequence[tuple[int, R]]) -> PromptBatch:
        """Batch of requests with one `batch_key` for one engine, with their numbers in the engine."""

    @abstractmethod
    def _read(self, requests: Sequence[R], arrays: Completions) -> Sequence[object]:
        """Parse an engine's answer to each of these requests; an exception ends the run."""

    @abstractmethod
    def _tell_failure(self, err: Exception) -> None:
        """Called after all requests have failed: no engine is left, or work in the thread has failed."""

    def _is_held(self, request: R) -> bool:
        """True if a request, and all behind it, stay here for now."""
        return False

    def _urgency(self, request: R) -> tuple[int, bool]:
        """Sort key, smallest first; equal requests in the order of arrival. Called when a request is queued."""
        return 0, False

    def _given(self, request: R, engine: int) -> None:
        """Called when a request goes to an engine."""

    def _taken(self, requests: Sequence[R]) -> None:
        """Called with the requests of a lost engine, which begin again on others."""

    def _load_changed(self) -> None:
        """Called when an engine's load has changed."""

    def lost(self, engine: int) -> None:
        """See `EngineListener`."""
        self.post(partial(self._replay, engine))

    def serving(self, engine: int) -> None:
        """See `EngineListener`."""
        self.post(partial(self._welcome, engine))

    def ended(self, err: EngineError) -> None:
        """See `EngineListener`."""
        self.post(partial(self._fail, err))

    def post(self, task: Callable[[], object]) -> None:
        """Run `task` soon, in the thread. From any thread."""

        def run() -> None:
            try:
                task()
            except Exception as err:
                self._fail(err)

        self.thread.submit(run)

    def queue(self, requests: Sequence[R]) -> None:
        """Queue requests, which are sent once engines have room."""
        for request in requests:
            self.waiting.add(request, self._urgency(request))
        self._dispatch()

    def withdraw(self, request: R, engine: int | None) -> None:
        """Cancel a request. Neither callback is called.

        Args:
            engine: the last engine of the request.
        """
        if self.waiting.remove(request) or engine is None or request in self.withdrawn:
            return
        # None: it was answered meanwhile.
        if (number := self.loads.number_of(engine, request)) is not None:
            self.withdrawn.add(request)
            self.fleet.call(engine, self.fleet.engines[engine], lambda engine: engine.withdraw([number]), self.verb)

    def resume(self) -> None:
        """Resume sampling."""
        self.is_sampling = True
        self._dispatch()
        self.fleet.resume()

    def _welcome(self, engine: int) -> None:
        """Use an engine that serves again."""
        if self.is_sampling and engine in self.fleet.members.open:
            self.fleet.resume([engine])
        self._dispatch()

    def _replay(self, engine: int) -> None:
        """Queue a lost engine's requests for the others, ahead of the waiting ones: they were sent first."""
        self.polled.discard(engine)
        dropped = self.loads.drop(engine)
        requests = [request for request in dropped if request not in self.withdrawn]
        self.withdrawn.difference_update(dropped)
        self._taken(requests)
        if requests:
            say(f"groups of {self.fleet.roster.named(engine)} that begin again on others: {len(requests)}")
        self.waiting.add_before((request, self._urgency(request)) for request in requests)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send the engines as many requests as they have room for."""
        if self.fleet.is_aborted:
            self._fail(EngineError("generation was aborted"))
            return
        engines = self.fleet.roster.open
        given: dict[tuple[int, Hashable], list[tuple[int, R]]] = {}
        while self.waiting and not self._is_held(request := self.waiting.first):
            if (place := self.loads.give(request, engines)) is None:
                break
            self.waiting.pop()
            engine, number = place
            self._given(request, engine)
            given.setdefault((engine, request.batch_key), []).append((number, request))
        for (engine, _), numbered in given.items():
            batch = self._batch(numbered)
            self.fleet.call(engine, engines[engine], partial(_submitted, batch), self.verb)
            self._poll(engine, engines[engine])

    def _poll(self, number: int, engine: Engine) -> None:
        if number not in self.polled:
            self.polled.add(number)
            gather_s = max(GATHER_S, len(self.fleet.engines) / MOST_POLLS_PER_S)
            answer = self.fleet.call(number, engine, lambda engine: engine.poll(gather_s), self.verb)
            answer.add_done_callback(lambda done: self.post(partial(self._arrived, number, engine, done)))

    def _arrived(self, number: int, engine: Engine, answer: Future[Completions]) -> None:
        if answer.exception() is not None or self.fleet.engines[number] is not engine:
            return
        arrays = answer.result()
        numbers, refused = arrays["numbers"].tolist(), arrays.get("refused", arrays["numbers"][:0]).tolist()
        if not self.loads.has(number, numbers + refused):
            return  # The engine was lost meanwhile, and its requests have begun again on others.
        self.polled.remove(number)
        requests, wrong = self.loads.of(number, numbers), self.loads.of(number, refused)
        answers = self._read(requests, arrays) if requests else []
        for each in numbers + refused:
            self.loads.finish(number, each)
        if self.loads.is_busy(number):
            self._poll(number, engine)
        self._dispatch()
        for request, read in zip(requests, answers, strict=True):
            if request in self.withdrawn:
                self.withdrawn.remove(request)
            else:
                request.done(read)
        refusals = zip(wrong, arrays["refusals"].tolist(), strict=True) if wrong else ()
        self.refuse([(request, why) for request, why in refusals if request not in self.withdrawn])
        self.withdrawn.difference_update(wrong)

    def refuse(self, requests: Sequence[tuple[R, str]]) -> None:
        """Fail these requests, each with its reason, and no others: every engine would refuse them."""
        if requests:
            named = [f"{request.name}: {reason}" for request, reason in requests]
            say(f"requests that no engine can answer: {len(named)}; {listed(named, '; ')}")
        for request, reason in requests:
            request.failed(RefusedError(f"the engine cannot answer the request of {request.name}: {reason}"))

    def _fail(self, err: Exception) -> None:
        for request in self.loads.clear() + self.waiting.clear():
            request.failed(err)
        self.withdrawn.clear()
        self._tell_failure(err)


def _submitted(batch: PromptBatch, engine: Engine) -> Future[None]:
    return engine.submit(batch)
