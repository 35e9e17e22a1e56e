"""Prompts out to the engines, and groups back as they finish.

One thread, `Dispatcher.thread`, holds the state of everything that is being sampled; what engines answer becomes work for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mgrpo.config.schema import Rollout
from mgrpo.processes.background import Background, announced
from mgrpo.rollout.collect import EVALUATION, Decode, seed_of, to_arrays, to_groups
from mgrpo.rollout.engine import Completions, EngineError, NotFiniteError, PromptBatch, Sampling
from mgrpo.rollout.fleet import Fleet
from mgrpo.types import Prompt, RolloutGroup

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt that is to be sampled."""

    prompt: Prompt
    sampling: Sampling
    stream: int
    """Separates the random numbers of evaluations from those of training."""
    done: Callable[[RolloutGroup], None]
    """Called in the dispatcher's thread."""
    failed: Callable[[Exception], None] = lambda err: None
    """Called in the dispatcher's thread instead; what trains learns of failures from `Dispatcher.on_failure`."""


@dataclass(slots=True, kw_only=True)
class _Share:
    """What one engine has."""

    requests: dict[int, tuple[Request, float]]
    """By number, with the cost of each."""
    cost: float = 0.0
    samples: int = 0
    is_polled: bool = False


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
        self.stop_token_ids, self.samples_per_engine = tuple(stop_token_ids), samples_per_engine
        self.thread = Background("rollout")
        self.numbers = itertools.count()
        self.shares = [_Share(requests={}) for _ in fleet.engines]
        self.waiting: list[Request] = []
        self.holds_training = False
        """Whether training prompts stay here, because the engines are paused; only with `samples_per_engine`."""
        self.on_failure: Callable[[Exception], None] = lambda err: None
        """Called in the dispatcher's thread when an engine, or work in this thread, has failed."""
        self.lengths = [0, 0]
        """Tokens of all answers of the training so far, and how many they are."""

    def for_training(self, prompt: Prompt, done: Callable[[RolloutGroup], None]) -> Request:
        """A group to train on."""
        rollout = self.rollout
        sampling = Sampling(
            num_samples=rollout.num_samples_per_prompt_rollout,
            max_tokens=rollout.response_length,
            temperature=rollout.temperature,
            stop_token_ids=self.stop_token_ids,
            stop_strings=rollout.stop_strings,
        )
        return Request(prompt=prompt, sampling=sampling, stream=0, done=done)

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
        engines = len(self.shares)
        with announced("the engine (generate)" if engines == 1 else f"{engines} engines (generate)", limit):
            try:
                return future.result(self.rollout.rollout_timeout)
            except TimeoutError:
                if future.done():
                    raise
        late = [str(number) for number, share in enumerate(self.shares) if share.requests]
        whose = "the engine" if engines == 1 else f"engines {', '.join(late)}"
        raise EngineError(
            f"could not generate within {limit}: no answer from {whose}; raise rollout_timeout if the work is that long"
            f"{self.fleet.keep_logs()}"
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or sampled."""
        return not self.waiting and not any(share.requests for share in self.shares)

    def send(self, requests: Sequence[Request]) -> None:
        """Sample these prompts, those of an evaluation first. In the dispatcher's thread."""
        self.waiting = sorted([*self.waiting, *requests], key=lambda request: request.stream)
        self._dispatch()

    def pause(self) -> Future[None]:
        """Have the engines sample no more. In the dispatcher's thread."""
        return self._all(self.fleet.pause())

    def resume(self) -> Future[None]:
        """Have the engines sample. In the dispatcher's thread."""
        self._dispatch()
        return self._all(self.fleet.resume())

    def _dispatch(self) -> None:
        """Give the engines what they have room for."""
        if self.fleet.is_aborted:
            self._fail(EngineError("generation was aborted"))
            return
        given: dict[tuple[int, Sampling, int], list[tuple[int, Request]]] = {}
        while self.waiting and (engine := self._engine_for(request := self.waiting[0])) is not None:
            del self.waiting[0]
            share, number, cost = self.shares[engine], next(self.numbers), self._cost(request)
            share.requests[number] = request, cost
            share.cost += cost
            share.samples += request.sampling.num_samples
            given.setdefault((engine, request.sampling, request.stream), []).append((number, request))
        for (engine, sampling, stream), numbered in given.items():
            self._submit(engine, sampling, stream, numbered)

    def _engine_for(self, request: Request) -> int | None:
        """The one with the least to do, if it has room."""
        engine = min(range(len(self.shares)), key=lambda number: (self.shares[number].cost, number))
        limit, share = self.samples_per_engine, self.shares[engine]
        if limit is None:
            return engine
        is_held = self.holds_training and request.stream != EVALUATION
        is_full = share.requests and share.samples + request.sampling.num_samples > limit
        return None if is_held or is_full else engine

    def _submit(self, engine: int, sampling: Sampling, stream: int, numbered: Sequence[tuple[int, Request]]) -> None:
        prompts = [request.prompt for _, request in numbered]
        tokens, cu_seqlens = to_arrays(prompts)
        seeds_prompts = self.fleet.seeds_prompts or bool(sampling.stop_strings)
        submitted = self.fleet.engines[engine].submit(
            PromptBatch(
                numbers=np.array([number for number, _ in numbered], np.int64),
                tokens=tokens,
                cu_seqlens=cu_seqlens,
                sampling=sampling,
                seeds=prompt_seeds(self.run_seed, prompts, stream) if seeds_prompts else None,
            )
        )
        self._all([submitted])
        self._poll(engine)

    def _all(self, calls: Sequence[Future[None]]) -> Future[None]:
        """Done when all these calls of engines are; if one fails, everything that is waited for does."""
        whole: Future[None] = Future()
        left = len(calls)

        def done(call: Future[None]) -> None:
            nonlocal left
            left -= 1
            if (err := call.exception()) is not None:
                self._lost(err)
                if not whole.done():
                    whole.set_exception(err)
            elif not left and not whole.done():
                whole.set_result(None)

        for call in calls:
            call.add_done_callback(lambda call: self.post(partial(done, call)))
        return whole

    def _poll(self, engine: int) -> None:
        share = self.shares[engine]
        if share.is_polled:
            return
        share.is_polled = True
        answer = self.fleet.engines[engine].poll()
        answer.add_done_callback(lambda done: self.post(partial(self._arrived, engine, done)))

    def _arrived(self, engine: int, answer: Future[Completions]) -> None:
        share = self.shares[engine]
        share.is_polled = False
        if (err := answer.exception()) is not None:
            self._lost(err)
            return
        arrays = answer.result()
        requests = [share.requests[number] for number in arrays["numbers"].tolist()]
        groups = to_groups([request.prompt for request, _ in requests], arrays, self.decode)
        if problem := next(filter(None, map(_problem, groups)), None):
            raise problem
        for number in arrays["numbers"].tolist():
            del share.requests[number]
        for (request, cost), group in zip(requests, groups, strict=True):
            share.cost -= cost
            share.samples -= request.sampling.num_samples
            if request.stream != EVALUATION:
                self.lengths[0] += sum(len(completion.tokens) for completion in group.completions)
                self.lengths[1] += len(group.completions)
        if share.requests:
            self._poll(engine)
        else:
            # What is left is the rounding of sums.
            share.cost = 0.0
        self._dispatch()
        for (request, _), group in zip(requests, groups, strict=True):
            request.done(group)

    def _cost(self, request: Request) -> float:
        """Tokens that an engine reads and is expected to write for a group."""
        total, count = self.lengths
        longest = request.sampling.max_tokens
        length = min(total / count, longest) if count else longest
        return len(request.prompt.tokens) + request.sampling.num_samples * length

    def _lost(self, err: BaseException) -> None:
        self._fail(EngineError(f"could not generate: {err}{self.fleet.keep_logs()}"))

    def _fail(self, err: Exception) -> None:
        failed = [request for share in self.shares for request, _ in share.requests.values()] + self.waiting
        self.shares = [_Share(requests={}, is_polled=share.is_polled) for share in self.shares]
        self.waiting = []
        for request in failed:
            request.failed(err)
        self.on_failure(err)

    def state_dict(self) -> Mapping[str, Any]:
        """What the choice of an engine depends on, in JSON."""
        return {"lengths": list(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.lengths = list(state["lengths"])

    def close(self) -> None:
        """Take no more work."""
        self.thread.close()


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
