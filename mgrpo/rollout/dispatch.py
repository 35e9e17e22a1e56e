"""Prompts out to the engines, and groups back as they finish.

One thread, `Dispatcher.thread`, owns the state of everything that is being sampled; every answer of an engine becomes work for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from mgrpo.config.schema import Rollout
from mgrpo.processes.background import Background, announced
from mgrpo.rollout.engine import GATHER_S, Completions, Engine, EngineError, NotFiniteError, PromptBatch, Sampling
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import say
from mgrpo.rollout.interaction import Interaction
from mgrpo.rollout.loads import Loads
from mgrpo.rollout.requests import (
    EVALUATION,
    Decode,
    Request,
    Unfinished,
    evaluation_requests,
    evaluation_sampling,
    prompt_batch,
    to_groups,
    training_sampling,
)
from mgrpo.types import Prompt, RolloutGroup

T = TypeVar("T")

MOST_POLLS_PER_S = 1000
"""Polls of all engines together that one thread can answer beside its other work."""


class TrainingListener(Protocol):
    """Sends groups to train on, and is told what becomes of them, in the dispatcher's thread."""

    def failed(self, err: Exception) -> None:
        """No engine is left to wait for, or work in the dispatcher's thread has failed."""

    def replayed(self, numbers: Sequence[int]) -> None:
        """These groups begin again, because their engine has failed or left."""

    def load_changed(self) -> None:
        """An engine has more or less to do."""


class Dispatcher:
    """Gives each group to the engine with the least to do. An `EngineListener` and the `Turns` of an interaction."""

    def __init__(
        self,
        fleet: Fleet,
        rollout: Rollout,
        *,
        run_seed: int,
        decode: Decode,
        stop_token_ids: Sequence[int],
        samples_per_engine: int | None = None,
        interaction: Interaction | None = None,
    ) -> None:
        """
        Args:
            interaction: turns a group into requests of one turn each; None: answers are sampled at a stretch.
            samples_per_engine: the samples that an engine is given at most at a time; others wait here, where they can still go to
                any engine. None: all at once, so that an engine's samples depend on nothing but the prompts.
        """
        self.fleet, self.rollout, self.run_seed, self.decode = fleet, rollout, run_seed, decode
        self.stop_token_ids = tuple(stop_token_ids)
        self.thread = Background("rollout")
        self.interaction = interaction
        self.unfinished = Unfinished()
        self.listener: TrainingListener | None = None
        """None as long as there are no groups to train on."""
        self.loads = Loads(samples_per_engine, on_change=self._load_changed)
        self.polled: set[int] = set()
        """Engines that have been asked for answers and have not answered."""
        self.waiting: list[Request] = []
        self.is_sampling = False
        """Whether the engines are not paused."""
        self.num_replayed = 0
        """Groups to train on that were taken from engines which failed or left, since `take_metrics`."""
        self.num_deaths = 0
        """The roster's, at `take_metrics`."""
        self.holds_training = False
        """Whether training prompts stay here, because the engines are paused."""
        if interaction is not None:
            interaction.start(self)
        fleet.roster.listen(self)

    def listen(self, listener: TrainingListener) -> None:
        """Tell `listener` from here on, instead of an earlier one. To be called before `for_training`."""
        self.listener = listener

    def lost(self, engine: int) -> None:
        """See `EngineListener`."""
        self.post(partial(self._replay, engine))

    def serving(self, engine: int) -> None:
        """See `EngineListener`."""
        self.post(partial(self._welcome, engine))

    def ended(self, err: EngineError) -> None:
        """See `EngineListener`."""
        self.post(partial(self._fail, err))

    def for_training(self, number: int, prompt: Prompt, done: Callable[[RolloutGroup], None]) -> Request:
        """A request for a group to train on.

        Args:
            number: the group's, under which the listener knows it.
        """
        assert self.listener is not None, (
            "`listen` first: whoever trains must learn that a group begins again or never comes"
        )
        sampling = training_sampling(self.rollout, self.stop_token_ids)
        return Request(prompt=prompt, sampling=sampling, stream=0, done=done, number=number)

    def sample_evaluation(self, prompts: Sequence[Prompt]) -> Future[list[RolloutGroup]]:
        """The groups of held-out prompts, in order, sampled with the settings of evaluations. From any thread."""
        whole, requests = evaluation_requests(prompts, evaluation_sampling(self.rollout, self.stop_token_ids))
        self.post(partial(self.send, requests))
        return whole

    def post(self, task: Callable[[], object]) -> None:
        """Do this soon, in the dispatcher's thread."""

        def run() -> None:
            try:
                task()
            except Exception as err:
                self._fail(err)

        self.thread.submit(run)

    def wait(self, future: Future[T]) -> T:
        """The result of a future that needs answers of the engines. From any thread except the dispatcher's own.

        Raises:
            EngineError: an engine has failed, the fleet was aborted, or `rollout_timeout` seconds have passed.
            NotFiniteError: a sampled token has a log-probability that is not finite.
        """
        limit = f"rollout_timeout={self.rollout.rollout_timeout:g} s"
        engines = len(self.fleet.engines)
        with announced("the engine (generate)" if engines == 1 else f"{engines} engines (generate)", limit):
            try:
                return future.result(self.rollout.rollout_timeout)
            except TimeoutError:
                if future.done():
                    raise
        others = "the environments" if self.unfinished.groups else "the rewards"
        busy = ", ".join(map(str, self.loads.busy()))
        whose = ("the engine" if engines == 1 else f"engines {busy}") if busy else others
        raise EngineError(
            f"could not generate within {limit}: no answer from {whose}; raise rollout_timeout if the work is that long"
            f"{self.fleet.roster.keep_logs()}"
        )

    def take_metrics(self) -> dict[str, float]:
        """Metrics of engines and environments since the last call. In the dispatcher's thread."""
        deaths, self.num_deaths = self.fleet.roster.num_deaths - self.num_deaths, self.fleet.roster.num_deaths
        replayed, self.num_replayed = self.num_replayed, 0
        return {
            "engines/serving": len(self.fleet.members.open),
            "engines/failed": deaths,
            "engines/replayed_groups": replayed,
            **(self.interaction.take_metrics() if self.interaction else {}),
        }

    def send(self, requests: Sequence[Request]) -> None:
        """Sample these prompts, those of an evaluation first. In the dispatcher's thread."""
        if self.interaction is None:
            self._queue(requests)
        elif requests:
            self.unfinished.groups.update(requests)
            self.interaction.begin(requests)

    def send_turns(self, requests: Sequence[Request], *, together: bool) -> None:
        """Sample these turns of groups that were sent before. In the dispatcher's thread.

        Args:
            together: nothing else is being sampled, and the engines' work must depend on these requests alone, not on the moment at
                which each arrives.
        """
        if not (together and self.is_sampling):
            self._queue(requests)
            return
        self.fleet.pause("keep")  # the cache of the earlier turns
        self._queue(requests)
        self.fleet.resume()

    def end(self, request: Request, group: RolloutGroup) -> None:
        """A group of several turns has come to its end. In the dispatcher's thread."""
        self.unfinished.end(request)
        request.done(group)

    def give_up(self, request: Request, err: Exception) -> None:
        """A group of several turns has failed, and with it the run. In the dispatcher's thread."""
        self.unfinished.end(request)
        request.failed(err)
        self._fail(err)

    def numbers_that_wait(self) -> list[int]:
        """The groups to train on that no engine has begun. In the dispatcher's thread."""
        groups = self.unfinished.groups if self.interaction else self.waiting
        return sorted(group.number for group in groups if group.is_training and not group.has_begun)

    def _queue(self, requests: Sequence[Request]) -> None:
        self.waiting = sorted([*self.waiting, *requests], key=_urgency)
        self._dispatch()

    def pause(self) -> Future[None]:
        """Have the engines sample no more; done when none of them samples. In the dispatcher's thread.

        Engines that are drained sample all turns of the groups that they have begun.
        """
        if self.fleet.pauses == "drain" and self.is_sampling:
            return self.unfinished.then(self._pause)
        return self._pause()

    def _pause(self) -> Future[None]:
        self.is_sampling = False
        return _settled(self.fleet.pause())

    def resume(self) -> None:
        """Have the engines sample. In the dispatcher's thread."""
        self.is_sampling = True
        self._dispatch()
        self.fleet.resume()

    def _welcome(self, engine: int) -> None:
        """An engine may be given groups again."""
        if self.is_sampling and engine in self.fleet.members.open:
            self.fleet.resume([engine])
        self._dispatch()

    def _replay(self, engine: int) -> None:
        """Requests of an engine that is lost go to the others, before all that wait: they were to be sampled first."""
        self.polled.discard(engine)
        requests = self.loads.drop(engine)
        numbers = [request.number for request in requests if request.is_training and request.is_beginning]
        for turn in [request.turn for request in requests if request.turn and request.is_beginning]:
            turn.whole.has_begun = False
        self.unfinished.review()
        self.num_replayed += len(numbers)
        if self.listener is not None:
            self.listener.replayed(numbers)
        if requests:
            say(f"groups of engine {engine} that begin again on others: {len(requests)}")
        self.waiting = sorted([*requests, *self.waiting], key=_urgency)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give the engines as many requests as they have room for."""
        if self.fleet.is_aborted:
            self._fail(EngineError("generation was aborted"))
            return
        engines = self.fleet.roster.open
        given: dict[tuple[int, Sampling, int], list[tuple[int, Request]]] = {}
        while self.waiting and not self._is_held(self.waiting[0]):
            request = self.waiting[0]
            if (place := self.loads.give(request, engines)) is None:
                break
            del self.waiting[0]
            engine, number = place
            request.engine = engine
            if request.turn is not None:
                request.turn.whole.has_begun = True
            given.setdefault((engine, request.sampling, request.stream), []).append((number, request))
        for (engine, sampling, stream), numbered in given.items():
            batch = self._batch(sampling, stream, numbered)
            self.fleet.call(engine, engines[engine], partial(_submitted, batch), "generate")
            self._poll(engine, engines[engine])

    def _is_held(self, request: Request) -> bool:
        """Whether a request stays here while engines are paused, or about to be."""
        may_end = self.fleet.pauses == "drain" and not request.is_beginning
        return self.holds_training and request.is_training and not may_end

    def _batch(self, sampling: Sampling, stream: int, numbered: Sequence[tuple[int, Request]]) -> PromptBatch:
        # An evaluation must not change with the training beside it, nor a turn with the moment at which a tool answers another one.
        is_beside_training = stream == EVALUATION and self.fleet.pauses != "drain"
        is_free = self.interaction is not None and not self.interaction.in_rounds
        seeds = self.fleet.seeds_prompts or sampling.is_timed or is_beside_training or is_free
        return prompt_batch(numbered, sampling, run_seed=self.run_seed if seeds else None)

    def _poll(self, number: int, engine: Engine) -> None:
        if number not in self.polled:
            self.polled.add(number)
            gather_s = max(GATHER_S, len(self.fleet.engines) / MOST_POLLS_PER_S)
            answer = self.fleet.call(number, engine, lambda engine: engine.poll(gather_s), "generate")
            answer.add_done_callback(lambda done: self.post(partial(self._arrived, number, engine, done)))

    def _arrived(self, number: int, engine: Engine, answer: Future[Completions]) -> None:
        if answer.exception() is not None or self.fleet.engines[number] is not engine:
            return
        arrays = answer.result()
        numbers = arrays["numbers"].tolist()
        if not self.loads.has(number, numbers):
            return  # The engine was given up meanwhile, and its groups have begun again on others.
        self.polled.remove(number)
        requests = self.loads.of(number, numbers)
        groups = to_groups([request.prompt for request in requests], arrays, self.decode)
        if problem := next(filter(None, map(_problem, groups)), None):
            raise problem
        for each in numbers:
            self.loads.finish(number, each)
        if number in self.loads.busy():
            self._poll(number, engine)
        self._dispatch()
        for request, group in zip(requests, groups, strict=True):
            request.done(group)

    def _fail(self, err: Exception) -> None:
        failed, self.waiting = self.loads.clear() + self.waiting, []
        for request in failed:
            request.failed(err)
        self.unfinished.fail(err)
        if self.listener is not None:
            self.listener.failed(err)

    def _load_changed(self) -> None:
        if self.listener is not None:
            self.listener.load_changed()


def _submitted(batch: PromptBatch, engine: Engine) -> Future[None]:
    return engine.submit(batch)


def _settled(calls: Sequence[Future[None]]) -> Future[None]:
    """Done when all these calls of engines have succeeded or failed: an engine that fails is no longer waited for."""
    whole: Future[None] = Future()
    left = set(calls)

    def done(call: Future[None]) -> None:
        with lock:
            left.discard(call)
            is_last = not left and not whole.done()
        if is_last:
            whole.set_result(None)

    lock = threading.Lock()
    if not calls:
        whole.set_result(None)
    for call in calls:
        call.add_done_callback(done)
    return whole


def _problem(group: RolloutGroup) -> EngineError | None:
    if any(completion.finish_reason == "abort" for completion in group.completions):
        return EngineError("generation was aborted")
    broken = [completion for completion in group.completions if not np.isfinite(completion.logprobs).all()]
    if not broken:
        return None
    version = int(broken[0].policy_versions[0])
    whose = "the model's weights" if version < 0 else f"the weights of policy version {version}"
    return NotFiniteError(
        f"{len(broken)} of {len(group.completions)} completions of a prompt have log-probabilities that are not finite, so "
        f"{whose} are broken or have diverged; look at the model, or lower learning_rate"
    )


def _urgency(request: Request) -> tuple[int, bool]:
    """Smaller comes first: evaluations, then groups that have begun."""
    return request.stream, request.is_beginning
