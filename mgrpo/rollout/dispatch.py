"""Prompts out to the engines, and groups back as they finish.

One thread, `Dispatcher.thread`, holds the state of everything that is being sampled; what engines answer becomes work for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np

from mgrpo.config.schema import Rollout
from mgrpo.processes.background import Background, announced
from mgrpo.rollout.collect import EVALUATION, Decode, seed_of, to_arrays, to_groups
from mgrpo.rollout.engine import GATHER_S, Completions, Engine, EngineError, NotFiniteError, PromptBatch, Sampling
from mgrpo.rollout.fleet import Fleet
from mgrpo.rollout.interaction import Interaction
from mgrpo.rollout.roster import say
from mgrpo.rollout.shares import NextTurn, Request, Shares
from mgrpo.types import Prompt, RolloutGroup

T = TypeVar("T")

MOST_POLLS_PER_S = 1000
"""Of all engines together: what one thread answers beside its other work."""


class Dispatcher:
    """Gives each group to the engine with the least to do."""

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
            interaction: what turns a group into requests of one turn each; None: answers are sampled at a stretch.
            samples_per_engine: what an engine is given at most at a time; what exceeds it waits here, where it can still go to
                any engine. None: all at once, so that what an engine samples depends on nothing but the prompts.
        """
        self.fleet, self.rollout, self.run_seed, self.decode = fleet, rollout, run_seed, decode
        self.stop_token_ids = tuple(stop_token_ids)
        self.thread = Background("rollout")
        self.interaction = interaction
        self.going: set[Request] = set()
        """Groups of several turns that have been begun."""
        self.on_drained: list[Future[None]] = []
        """Done when no group of several turns has something sampled and is not finished."""
        self.shares = Shares(samples_per_engine)
        self.polled: set[int] = set()
        """Engines that have been asked for answers."""
        self.waiting: list[Request] = []
        self.is_sampling = False
        """Whether the engines are not paused."""
        self.num_replayed = self.num_deaths = 0
        """Groups to train on that were taken from engines which failed or left; engines that have failed, when last told."""
        self.holds_training = False
        """Whether training prompts stay here, because the engines are paused."""
        self.on_failure: Callable[[Exception], None] = lambda err: None
        """Called in the dispatcher's thread when no engine is left to wait for, or work in this thread has failed."""
        self.on_replay: Callable[[Sequence[int]], None] = lambda numbers: None
        """Called in the dispatcher's thread with the numbers of groups that begin again."""
        if interaction is not None:
            interaction.start(self)
        fleet.roster.on_lost = lambda engine: self.post(partial(self._replay, engine))
        fleet.roster.on_serving = lambda engine: self.post(partial(self._welcome, engine))
        fleet.roster.on_end = lambda err: self.post(partial(self._fail, err))

    def for_training(self, number: int, prompt: Prompt, done: Callable[[RolloutGroup], None]) -> Request:
        """A group to train on, which has a number there."""
        rollout = self.rollout
        sampling = Sampling(
            num_samples=rollout.num_samples_per_prompt_rollout,
            max_tokens=rollout.response_length,
            temperature=rollout.temperature,
            stop_token_ids=self.stop_token_ids,
            stop_strings=rollout.stop_strings,
        )
        return Request(prompt=prompt, sampling=sampling, stream=0, done=done, number=number)

    def sample_evaluation(self, prompts: Sequence[Prompt]) -> Future[list[RolloutGroup]]:
        """Sample held-out prompts with the settings of evaluations; their groups, in order. From any thread."""
        rollout = self.rollout
        sampling = Sampling(
            num_samples=rollout.eval_pass_at_k,
            max_tokens=rollout.eval_response_length or rollout.response_length,
            temperature=rollout.temperature if rollout.eval_temperature is None else rollout.eval_temperature,
            stop_token_ids=self.stop_token_ids,
            top_p=rollout.eval_top_p,
            stop_strings=rollout.stop_strings,
        )
        whole: Future[list[RolloutGroup]] = Future()
        found: dict[int, RolloutGroup] = {}

        def done(place: int, group: RolloutGroup) -> None:
            found[place] = group
            if len(found) == len(prompts):
                whole.set_result([found[place] for place in range(len(prompts))])

        def failed(err: Exception) -> None:
            if not whole.done():
                whole.set_exception(err)

        requests = [
            Request(prompt=prompt, sampling=sampling, stream=EVALUATION, done=partial(done, place), failed=failed)
            for place, prompt in enumerate(prompts)
        ]
        if not requests:
            whole.set_result([])
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
        """What needs answers of the engines. From any thread but the dispatcher's own.

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
        busy = self.shares.busy()
        others = "the environments" if self.going else "the rewards"
        whose = ("the engine" if engines == 1 else f"engines {', '.join(map(str, busy))}") if busy else others
        raise EngineError(
            f"could not generate within {limit}: no answer from {whose}; raise rollout_timeout if the work is that long"
            f"{self.fleet.keep_logs()}"
        )

    def take_metrics(self) -> dict[str, float]:
        """What has happened to engines and environments since the last call. In the dispatcher's thread."""
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
            self.going.update(requests)
            self.interaction.begin(requests)

    def send_turns(self, requests: Sequence[Request], *, together: bool) -> None:
        """Sample these turns of groups that were sent before. In the dispatcher's thread.

        Args:
            together: nothing else is being sampled, and what engines do shall depend on these requests alone, not on the moment
                at which each arrives.
        """
        if not (together and self.is_sampling):
            self._queue(requests)
            return
        # Later turns read what the engines have cached of the earlier ones.
        self.fleet.pause("keep")
        self._queue(requests)
        self.fleet.resume()

    def end(self, request: Request, group: RolloutGroup) -> None:
        """A group of several turns has come to its end. In the dispatcher's thread."""
        self.going.discard(request)
        self._note_drained()
        request.done(group)

    def give_up(self, request: Request, err: Exception) -> None:
        """A group of several turns has failed, and with it the run. In the dispatcher's thread."""
        self.going.discard(request)
        request.failed(err)
        self._fail(err)

    def numbers_that_wait(self) -> list[int]:
        """The groups to train on of which no engine has been given anything. In the dispatcher's thread."""
        waiting = self.going if self.interaction else self.waiting
        return sorted(request.number for request in waiting if request.is_training and not request.has_begun)

    def _queue(self, requests: Sequence[Request]) -> None:
        self.waiting = sorted([*self.waiting, *requests], key=_urgency)
        self._dispatch()

    def pause(self) -> Future[None]:
        """Have the engines sample no more; done when none of them does. In the dispatcher's thread.

        Engines that are drained sample all turns of the groups that they have begun.
        """
        if self.fleet.pauses != "drain" or not self.is_sampling or not any(request.has_begun for request in self.going):
            self.is_sampling = False
            return _settled(self.fleet.pause())
        drained: Future[None] = Future()
        self.on_drained.append(drained)
        return drained

    def _note_drained(self) -> None:
        """Pause as soon as the groups that have begun are finished, if that is waited for."""
        if not self.on_drained or any(request.has_begun for request in self.going):
            return
        waiting, self.on_drained = self.on_drained, []
        self.is_sampling = False
        paused = _settled(self.fleet.pause())
        for drained in waiting:
            paused.add_done_callback(partial(_settle, drained))

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
        """What an engine had goes to the others, before all that waits: it was to be sampled first."""
        self.polled.discard(engine)
        requests = self.shares.drop(engine)
        numbers = [request.number for request in requests if request.is_training and request.is_beginning]
        for request in requests:
            if request.turn is not None and request.is_beginning:
                request.turn.whole.has_begun = False
        self.num_replayed += len(numbers)
        self.on_replay(numbers)
        if requests:
            say(f"groups of engine {engine} that begin again on others: {len(requests)}")
        self.waiting = sorted([*requests, *self.waiting], key=_urgency)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give the engines what they have room for."""
        if self.fleet.is_aborted:
            self._fail(EngineError("generation was aborted"))
            return
        engines = self.fleet.open
        given: dict[tuple[int, Sampling, int], list[tuple[int, Request]]] = {}
        while self.waiting and not self._is_held(self.waiting[0]):
            request = self.waiting[0]
            if (place := self.shares.give(request, engines)) is None:
                break
            del self.waiting[0]
            engine, number = place
            request.engine = engine
            if request.turn is not None:
                request.turn.whole.has_begun = True
            given.setdefault((engine, request.sampling, request.stream), []).append((number, request))
        for (engine, sampling, stream), numbered in given.items():
            self._submit(engine, engines[engine], self._batch(sampling, stream, numbered))

    def _is_held(self, request: Request) -> bool:
        """Whether a request stays here while engines are paused, or about to be."""
        may_end = self.fleet.pauses == "drain" and not request.is_beginning
        return self.holds_training and request.is_training and not may_end

    def _batch(self, sampling: Sampling, stream: int, numbered: Sequence[tuple[int, Request]]) -> PromptBatch:
        requests = [request for _, request in numbered]
        prompts, turns = [request.prompt for request in requests], [request.turn for request in requests]
        tokens, cu_seqlens = to_arrays([request.tokens for request in requests])
        # What is sampled beside an evaluation must not change it.
        is_beside_training = stream == EVALUATION and self.fleet.pauses != "drain"
        seeds_prompts = self.fleet.seeds_prompts or bool(sampling.stop_strings) or is_beside_training
        return PromptBatch(
            numbers=np.array([number for number, _ in numbered], np.int64),
            tokens=tokens,
            cu_seqlens=cu_seqlens,
            sampling=sampling,
            seeds=prompt_seeds(self.run_seed, prompts, stream, turns=turns) if seeds_prompts else None,
            max_tokens=np.array([request.max_tokens for request in requests]) if self.interaction else None,
            salts=np.array([turn.salt for turn in turns if turn]) if self.interaction else None,
        )

    def _submit(self, number: int, engine: Engine, batch: PromptBatch) -> None:
        self.fleet.call(number, engine, lambda engine: engine.submit(batch), "generate")
        self._poll(number, engine)

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
        if not self.shares.has(number, numbers):
            return  # It was given up meanwhile, and its groups have begun again on others.
        self.polled.remove(number)
        requests = self.shares.of(number, numbers)
        groups = to_groups([request.prompt for request in requests], arrays, self.decode)
        if problem := next(filter(None, map(_problem, groups)), None):
            raise problem
        for each in numbers:
            self.shares.finish(number, each)
        if number in self.shares.busy():
            self._poll(number, engine)
        self._dispatch()
        for request, group in zip(requests, groups, strict=True):
            request.done(group)

    def _fail(self, err: Exception) -> None:
        failed, self.waiting = self.shares.clear() + self.waiting, []
        for request in failed:
            request.failed(err)
        self.on_failure(err)


def _settled(calls: Sequence[Future[None]]) -> Future[None]:
    """Done when all these calls of engines are, well or not: an engine that fails is no longer waited for."""
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


def _settle(waiting: Future[None], done: Future[None]) -> None:
    waiting.set_result(done.result())


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


def prompt_seeds(
    run_seed: int, prompts: Sequence[Prompt], stream: int, *, turns: Sequence[NextTurn | None] | None = None
) -> np.ndarray:
    """`[prompts]` int64: one seed per prompt of a run, and later turn; `stream` separates evaluations from training.

    With stop strings the engine learns a moment late that a completion has ended, and its row stays in the batch that
    long: were all rows drawn from one stream, the others' samples would depend on that moment. On GPUs vLLM draws the seeds
    of requests without one from a state that every engine begins alike and no sync reaches.
    """
    later = [(turn.sample, turn.turn) if turn and turn.turn else () for turn in turns or [None] * len(prompts)]
    seeds = [seed_of(run_seed, stream, *prompt.id, *turn) for prompt, turn in zip(prompts, later, strict=True)]
    return np.array(seeds, np.int64)
