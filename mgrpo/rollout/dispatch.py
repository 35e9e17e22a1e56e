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
from mgrpo.rollout.roster import say
from mgrpo.rollout.shares import Request, Shares
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
    ) -> None:
        """
        Args:
            samples_per_engine: what an engine is given at most at a time; what exceeds it waits here, where it can still go to
                any engine. None: all at once, so that what an engine samples depends on nothing but the prompts.
        """
        self.fleet, self.rollout, self.run_seed, self.decode = fleet, rollout, run_seed, decode
        self.stop_token_ids = tuple(stop_token_ids)
        self.thread = Background("rollout")
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
        whose = ("the engine" if engines == 1 else f"engines {', '.join(map(str, busy))}") if busy else "the rewards"
        raise EngineError(
            f"could not generate within {limit}: no answer from {whose}; raise rollout_timeout if the work is that long"
            f"{self.fleet.keep_logs()}"
        )

    def take_metrics(self) -> dict[str, float]:
        """What has happened to the engines since the last call. In the dispatcher's thread."""
        deaths, self.num_deaths = self.fleet.roster.num_deaths - self.num_deaths, self.fleet.roster.num_deaths
        replayed, self.num_replayed = self.num_replayed, 0
        return {
            "engines/serving": len(self.fleet.members.open),
            "engines/failed": deaths,
            "engines/replayed_groups": replayed,
        }

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or sampled."""
        return not self.waiting and not self.shares.busy()

    def send(self, requests: Sequence[Request]) -> None:
        """Sample these prompts, those of an evaluation first. In the dispatcher's thread."""
        self.waiting = sorted([*self.waiting, *requests], key=lambda request: request.stream)
        self._dispatch()

    def pause(self) -> Future[None]:
        """Have the engines sample no more; done when none of them does. In the dispatcher's thread."""
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
        """What an engine had goes to the others, before all that waits: it was to be sampled first."""
        self.polled.discard(engine)
        requests = self.shares.drop(engine)
        numbers = [request.number for request in requests if request.is_training]
        self.num_replayed += len(numbers)
        self.on_replay(numbers)
        if requests:
            say(f"groups of engine {engine} that begin again on others: {len(requests)}")
        self.waiting = sorted([*requests, *self.waiting], key=lambda request: request.stream)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give the engines what they have room for."""
        if self.fleet.is_aborted:
            self._fail(EngineError("generation was aborted"))
            return
        engines = self.fleet.open
        given: dict[tuple[int, Sampling, int], list[tuple[int, Request]]] = {}
        while self.waiting and not (self.holds_training and self.waiting[0].is_training):
            request = self.waiting[0]
            if (place := self.shares.give(request, engines)) is None:
                break
            del self.waiting[0]
            engine, number = place
            given.setdefault((engine, request.sampling, request.stream), []).append((number, request))
        for (engine, sampling, stream), numbered in given.items():
            self._submit(engine, engines[engine], self._batch(sampling, stream, numbered))

    def _batch(self, sampling: Sampling, stream: int, numbered: Sequence[tuple[int, Request]]) -> PromptBatch:
        prompts = [request.prompt for _, request in numbered]
        tokens, cu_seqlens = to_arrays(prompts)
        # What is sampled beside an evaluation must not change it.
        is_beside_training = stream == EVALUATION and self.fleet.pauses != "drain"
        seeds_prompts = self.fleet.seeds_prompts or bool(sampling.stop_strings) or is_beside_training
        return PromptBatch(
            numbers=np.array([number for number, _ in numbered], np.int64),
            tokens=tokens,
            cu_seqlens=cu_seqlens,
            sampling=sampling,
            seeds=prompt_seeds(self.run_seed, prompts, stream) if seeds_prompts else None,
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


def prompt_seeds(run_seed: int, prompts: Sequence[Prompt], stream: int) -> np.ndarray:
    """`[prompts]` int64: one seed per prompt of a run; `stream` separates evaluations from training.

    With stop strings the engine learns a moment late that a completion has ended, and its row stays in the batch that
    long: were all rows drawn from one stream, the others' samples would depend on that moment. On GPUs vLLM draws the seeds
    of requests without one from a state that every engine begins alike and no sync reaches.
    """
    return np.array([seed_of(run_seed, stream, *prompt.id) for prompt in prompts], np.int64)
