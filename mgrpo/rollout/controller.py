"""The controller: turns prompts into scored groups with the engines, on rank 0, without torch.distributed.

It runs in a thread of its own, so that rank 0 can tell the other learners that it is alive while a generation lasts.
What other rooms do for it comes in as callables: the next prompts, decoding, scoring.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mgrpo.config.schema import Config
from mgrpo.rollout.collect import EVALUATION, Decode, split_evenly, to_arrays, to_groups
from mgrpo.rollout.vllm.actor import Sampling
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.types import Prompt, RolloutGroup, ScoredGroup

Score = Callable[[Sequence[RolloutGroup]], list[ScoredGroup]]
Keep = Callable[[Sequence[ScoredGroup]], Sequence[bool]]
"""Which groups are worth training on; may also tell the data room which prompts not to bring again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The scored groups of one step or evaluation, in the order of their prompts, and the seconds they took."""

    groups: list[ScoredGroup]
    """To train on."""
    dropped: list[ScoredGroup]
    """Sampled, but not worth training on."""
    generate_s: float
    score_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Prompts that lie queued in the engines."""

    number: int
    shares: list[Sequence[Prompt]]
    """By engine."""
    num_samples: int


def prompt_seeds(run_seed: int, prompts: Sequence[Prompt], stream: int) -> np.ndarray:
    """`[prompts]` int64: a seed of its own for every prompt of a run; `stream` tells evaluations from training.

    With stop strings the engine's core hears a moment late that a completion has ended, and its row stays in the batch that
    long: were all rows drawn from one stream, the others' samples would depend on that moment.
    """
    words = (f"{run_seed}/{stream}/{prompt.id[0]}/{prompt.id[1]}".encode() for prompt in prompts)
    return np.array(
        [int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little") >> 2 for word in words], np.int64
    )


class Controller:
    """One batch of scored groups after another. `next_batch` and `evaluate` answer with a future."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        *,
        next_prompts: Callable[[int], list[Prompt]],
        decode: Decode,
        score: Score,
        keep: Keep,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.config, self.cluster = config, cluster
        self.next_prompts, self.decode, self.score, self.keep = next_prompts, decode, score, keep
        self.stop_token_ids = tuple(stop_token_ids)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="controller")
        self.numbers = itertools.count()
        self.prepared: Batch | None = None

    def prepare(self) -> None:
        """Queue the next training batch in the engines now; nothing of it runs before `next_batch`.

        Not before an evaluation, which would run it too.
        """
        self.prepared = self._queue_training(self.config.rollout.num_unique_prompts_rollout)

    def next_batch(self) -> Future[Rollouts]:
        """The groups of the next training step, sampled by the engines' present weights."""
        if self.prepared is None:
            self.prepare()
        batch, self.prepared = self.prepared, None
        return self.thread.submit(self._collect_kept, batch)

    def evaluate(self, prompts: Sequence[Prompt]) -> Future[Rollouts]:
        """Groups for held-out prompts, sampled as the settings of evaluations say."""
        return self.thread.submit(self._collect, self._queue(prompts, self._evaluation(), EVALUATION))

    def close(self) -> None:
        """Stop taking work; a generation that is under way is left to the engines' end."""
        self.thread.shutdown(wait=False, cancel_futures=True)

    def _queue_training(self, num_prompts: int) -> Batch:
        rollout = self.config.rollout
        sampling = Sampling(
            num_samples=rollout.num_samples_per_prompt_rollout,
            max_tokens=rollout.response_length,
            temperature=rollout.temperature,
            stop_token_ids=self.stop_token_ids,
            stop_strings=rollout.stop_strings,
        )
        return self._queue(self.next_prompts(num_prompts), sampling)

    def _evaluation(self) -> Sampling:
        rollout = self.config.rollout
        return Sampling(
            num_samples=rollout.eval_pass_at_k,
            max_tokens=rollout.eval_response_length or rollout.response_length,
            temperature=rollout.temperature if rollout.eval_temperature is None else rollout.eval_temperature,
            stop_token_ids=self.stop_token_ids,
            top_p=rollout.eval_top_p,
            stop_strings=rollout.stop_strings,
        )

    def _queue(self, prompts: Sequence[Prompt], sampling: Sampling, stream: int = 0) -> Batch:
        batch = Batch(
            number=next(self.numbers),
            shares=split_evenly(prompts, len(self.cluster.engines)),
            num_samples=sampling.num_samples,
        )
        for engine, share in zip(self.cluster.engines, batch.shares, strict=True):
            words = [batch.number, *to_arrays(share), sampling]
            if sampling.stop_strings:
                words.append(prompt_seeds(self.config.experiment.seed, share, stream))
            engine.queue.remote(*words)
        return batch

    def _collect_kept(self, batch: Batch) -> Rollouts:
        """The batch's groups that are worth training on; with active sampling others in place of the rest."""
        algorithm, wanted = self.config.algorithm, self.config.rollout.num_unique_prompts_rollout
        rounds = algorithm.active_sampling_max_rounds if algorithm.active_sampling else 1
        kept: list[ScoredGroup] = []
        dropped: list[ScoredGroup] = []
        generate_s = score_s = 0.0
        for number in range(rounds):
            sampled = self._collect(batch if number == 0 else self._queue_training(wanted - len(kept)))
            for group, is_kept in zip(sampled.groups, self.keep(sampled.groups), strict=True):
                (kept if is_kept else dropped).append(group)
            generate_s, score_s = generate_s + sampled.generate_s, score_s + sampled.score_s
            if len(kept) == wanted or not sampled.groups:
                break
        return Rollouts(groups=kept, dropped=dropped, generate_s=generate_s, score_s=score_s)

    def _collect(self, batch: Batch) -> Rollouts:
        start = time.perf_counter()
        calls = [engine.generate.remote(batch.number) for engine in self.cluster.engines]
        answers = self.cluster.get(calls, self.config.rollout.rollout_timeout, "generate", "rollout_timeout")
        groups = [
            group
            for share, arrays in zip(batch.shares, answers, strict=True)
            for group in to_groups(share, arrays, batch.num_samples, self.decode)
        ]
        generated = time.perf_counter()
        scored = self.score(groups)
        score_s = time.perf_counter() - generated
        return Rollouts(groups=scored, dropped=[], generate_s=generated - start, score_s=score_s)
