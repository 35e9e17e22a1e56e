"""Prompts out to the engines, whole groups back, in the order of the prompts and not of arrival."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mgrpo.config.schema import Rollout
from mgrpo.rollout.collect import EVALUATION, Decode, seed_of, split_evenly, to_arrays, to_groups
from mgrpo.rollout.engine import EngineError, NotFiniteError, PromptBatch, Sampling
from mgrpo.rollout.fleet import Fleet
from mgrpo.types import Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """Prompts that are queued in the engines."""

    number: int
    shares: list[Sequence[Prompt]]
    """By engine."""
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The groups of one submission, in the order of their prompts."""

    groups: list[RolloutGroup]
    seconds: float
    """From `take` to the last answer, decoding included."""


class Dispatcher:
    """Splits prompts over the engines. For one thread at a time."""

    def __init__(
        self, fleet: Fleet, rollout: Rollout, *, run_seed: int, decode: Decode, stop_token_ids: Sequence[int]
    ) -> None:
        self.fleet, self.rollout, self.run_seed, self.decode = fleet, rollout, run_seed, decode
        self.stop_token_ids = tuple(stop_token_ids)
        self.numbers = itertools.count()

    def submit(self, prompts: Sequence[Prompt]) -> Submitted:
        """Queue training prompts; none of them runs before `take`.

        Do not call it before an evaluation, whose `take` would run them too early.
        """
        rollout = self.rollout
        sampling = Sampling(
            num_samples=rollout.num_samples_per_prompt_rollout,
            max_tokens=rollout.response_length,
            temperature=rollout.temperature,
            stop_token_ids=self.stop_token_ids,
            stop_strings=rollout.stop_strings,
        )
        return self._submit(prompts, sampling, stream=0)

    def submit_evaluation(self, prompts: Sequence[Prompt]) -> Submitted:
        """Queue held-out prompts, with the settings of evaluations."""
        rollout = self.rollout
        sampling = Sampling(
            num_samples=rollout.eval_pass_at_k,
            max_tokens=rollout.eval_response_length or rollout.response_length,
            temperature=rollout.temperature if rollout.eval_temperature is None else rollout.eval_temperature,
            stop_token_ids=self.stop_token_ids,
            top_p=rollout.eval_top_p,
            stop_strings=rollout.stop_strings,
        )
        return self._submit(prompts, sampling, stream=EVALUATION)

    def take(self, submitted: Submitted) -> Sampled:
        """Sample with the engines' present weights.

        Raises:
            EngineError: an engine has failed, the fleet was aborted, or `rollout_timeout` seconds have passed.
            NotFiniteError: a sampled token has a log-probability that is not finite.
        """
        self.fleet.check_not_aborted()
        start = time.perf_counter()
        answers = self.fleet.results(
            [engine.take(submitted.number) for engine in self.fleet.engines],
            what="generate",
            field="rollout_timeout",
            timeout_s=self.rollout.rollout_timeout,
        )
        groups = [
            group
            for share, arrays in zip(submitted.shares, answers, strict=True)
            for group in to_groups(share, arrays, submitted.num_samples, self.decode)
        ]
        if any(completion.finish_reason == "abort" for group in groups for completion in group.completions):
            raise EngineError("generation was aborted")
        _check_finite(groups)
        return Sampled(groups=groups, seconds=time.perf_counter() - start)

    def _submit(self, prompts: Sequence[Prompt], sampling: Sampling, *, stream: int) -> Submitted:
        submitted = Submitted(
            number=next(self.numbers),
            shares=split_evenly(prompts, len(self.fleet.engines)),
            num_samples=sampling.num_samples,
        )
        seeds_prompts = self.fleet.seeds_prompts or bool(sampling.stop_strings)
        for engine, share in zip(self.fleet.engines, submitted.shares, strict=True):
            tokens, cu_seqlens = to_arrays(share)
            engine.submit(
                PromptBatch(
                    number=submitted.number,
                    tokens=tokens,
                    cu_seqlens=cu_seqlens,
                    sampling=sampling,
                    seeds=prompt_seeds(self.run_seed, share, stream) if seeds_prompts else None,
                )
            )
        return submitted


def _check_finite(groups: Sequence[RolloutGroup]) -> None:
    completions = [completion for group in groups for completion in group.completions]
    broken = [completion for completion in completions if not np.isfinite(completion.logprobs).all()]
    if broken:
        version = int(broken[0].policy_versions[0])
        whose = "the model's weights" if version < 0 else f"the weights of policy version {version}"
        raise NotFiniteError(
            f"{len(broken)} of {len(completions)} completions have log-probabilities that are not finite, so {whose} are "
            "broken or have diverged; look at the model, or lower learning_rate"
        )


def prompt_seeds(run_seed: int, prompts: Sequence[Prompt], stream: int) -> np.ndarray:
    """`[prompts]` int64: one seed per prompt of a run; `stream` separates evaluations from training.

    With stop strings the engine learns a moment late that a completion has ended, and its row stays in the batch that
    long: were all rows drawn from one stream, the others' samples would depend on that moment. On GPUs vLLM draws the seeds
    of requests without one from a state that every engine begins alike and no sync reaches.
    """
    return np.array([seed_of(run_seed, stream, *prompt.id) for prompt in prompts], np.int64)
