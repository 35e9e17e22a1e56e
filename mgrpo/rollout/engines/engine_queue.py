"""Requests out to the engines of one model, and answers back as they come.

One thread owns the state of everything that has been asked; every answer of an engine becomes work for it.
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
"""Polls of all engines together that one thread can answer beside its other work."""


class QueuedWork(Work, Protocol):
    """A request that is queued, and learns what becomes of it in the queue's thread."""

    @property
    def name(self) -> str:
        """The request, in the words of a message."""

    @property
    def batch_key(self) -> Hashable:
        """Requests of one batch have the same."""

    @property
    def done(self) -> Callable[[Any], None]:
        """Called with the answer."""

    @property
    def failed(self) -> Callable[[Exception], None]:
        """Called instead when it will never come: with a RefusedError where that is so of this request alone."""


R = TypeVar("R", bound=QueuedWork)


class EngineQueue(ABC, Generic[R]):
    """Gives each request to the engine with the least to do, and again to another if that one fails. An `EngineListener`.

    Methods are for the thread, unless they say otherwise.
    """

    verb = "generate"
    """What the engines do, in the words of an error."""

    def __init__(self, fleet: Fleet, thread: Background, *, samples_per_engine: int | None = None) -> None:
        """
        Args:
            samples_per_engine: the samples that an engine is given at most at a time; others wait here, where they can still go to
                any engine. None: all at once, so that an engine's samples depend on nothing but the prompts.
        """
        self.fleet, self.thread = fleet, thread
        self.loads: Loads[R] = Loads(samples_per_engine, on_change=self._load_changed)
        self.polled: set[int] = set()
        """Engines that have been asked for answers and have not answered."""
        self.waiting: UrgencyQueue[R] = UrgencyQueue()
        self.withdrawn: set[R] = set()
        """Requests that engines have and nobody waits for."""
        self.is_sampling = False
        """Whether the engines are not paused."""
        fleet.roster.listen(self)

    @abstractmethod
    def _batch(self, numbered: Sequence[tuple[int, R]]) -> PromptBatch:
        """The batch for one engine of requests of one `batch_key`, with the numbers by which the engine knows them."""

    @abstractmethod
    def _read(self, requests: Sequence[R], arrays: Completions) -> Sequence[object]:
        """What an engine's answer says to each of these requests; an error that it raises ends the run."""

    @abstractmethod
    def _tell_failure(self, err: Exception) -> None:
        """No engine is left to wait for, or work in the thread has failed: all requests have failed."""

    def _is_held(self, request: R) -> bool:
        """Whether a request, and all that wait behind it, stay here for now."""
        return False

    def _urgency(self, request: R) -> tuple[int, bool]:
        """Smaller comes first; requests that are equal, in the order of their arrival. Asked when a request begins to wait."""
        return 0, False

    def _given(self, request: R, engine: int) -> None:
        """An engine is given a request."""

    def _taken(self, requests: Sequence[R]) -> None:
        """An engine that is lost had been given these, which begin again on others."""

    def _load_changed(self) -> None:
        """An engine has more or less to do."""

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
        """Do this soon, in the thread. From any thread."""

        def run() -> None:
            try:
                task()
            except Exception as err:
                self._fail(err)

        self.thread.submit(run)

    def queue(self, requests: Sequence[R]) -> None:
        """Have these requests done, as soon as engines have room."""
        for request in requests:
            self.waiting.add(request, self._urgency(request))
        self._dispatch()

    def withdraw(self, request: R, engine: int | None) -> None:
        """Have a request that nobody waits for sampled no further. Neither its `done` nor its `failed` is called.

        Args:
            engine: the last one that it was given to.
        """
        if self.waiting.remove(request) or engine is None or request in self.withdrawn:
            return
        # Else it was answered meanwhile.
        if (number := self.loads.number_of(engine, request)) is not None:
            self.withdrawn.add(request)
            self.fleet.call(engine, self.fleet.engines[engine], lambda engine: engine.withdraw([number]), self.verb)

    def resume(self) -> None:
        """Have the engines sample."""
        self.is_sampling = True
        self._dispatch()
        self.fleet.resume()

    def _welcome(self, engine: int) -> None:
        """An engine may be given requests again."""
        if self.is_sampling and engine in self.fleet.members.open:
            self.fleet.resume([engine])
        self._dispatch()

    def _replay(self, engine: int) -> None:
        """Requests of an engine that is lost go to the others, before all that wait: they were to be done first."""
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
        """Give the engines as many requests as they have room for."""
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
            return  # The engine was given up meanwhile, and its requests have begun again on others.
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
