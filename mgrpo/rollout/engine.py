"""The contract of an inference engine, independent of what runs it. Standard library and numpy only.

An engine is paused or samples what it has been given, and hands over groups as they finish. While it is paused it takes over
new weights, in a transfer group that it has joined together with the learners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
UNSYNCED = -1
"""Policy version of the weights that an engine has loaded itself."""

Completions = dict[str, np.ndarray]
"""The completions of finished groups, group by group, sample by sample: `numbers [groups]` int64 are those that the prompts
were given, `sizes [groups]` int64 counts samples. `tokens` int32, `logprobs` float32 and `policy_versions` int32
`[sum(len)]` are cut by `cu_seqlens [samples + 1]` int64; `finish_reasons [samples]` int8 indexes FINISH_REASONS.

Under `Sampling.has_sets` also the sets of `Completion.kept`: `kept_ids` int32, and how many each token has, `kept_sizes [sum(len)]`
int32, 0 where the engine does not know the whole set.

With `Sampling.keeps_routes`, from engines that say which experts they chose, also `Completion.routes` end to end: `routes [sum(
route_sizes), MoE layers, top_k]`, and how many tokens of each sample have them, `route_sizes [samples]` int64: those of the prompt and its
own except the last, or none.

From engines that draft also `drafts [3]` int64: how many times they did since the last answer, how many tokens, and how many were accepted.

Under `Sampling.prompt_logprobs` also what was asked of the prompts' tokens: `prompt_sizes [groups]` int64 counts them, `prompt_logprobs
[sum(sizes)]` float32 are their own, `prompt_ids` int32 and `prompt_likeliest` float32 `[sum(sizes), k]` the likeliest at their places,
with -1 and NaN where the engine gave fewer.

Of requests that were refused also their numbers, `refused [requests]` int64, and the engine's reasons, `refusals [requests]` text. Where no
group has finished there is nothing else beside an empty `numbers`."""

Pause = Literal["drain", "recompute", "keep"]
"""The fate of completions that have begun. drain samples them to their end before the engine pauses. Otherwise they go on after
the pause: recompute drops their cache, which the engine computes again with its new weights, keep goes on with keys and values of
the old ones."""


class EngineError(RuntimeError):
    """An engine failed, died or did not answer in time."""


class WrongAnswerError(EngineError):
    """An engine's answer does not fit its question. It would not at the next one: the engine is given up."""


class RefusedError(EngineError):
    """A request that every engine would refuse. It fails alone, and is given to no other engine."""


class NotFiniteError(EngineError):
    """An engine sampled with log-probabilities that are not finite: its weights are broken, or have diverged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling settings of one batch."""

    num_samples: int
    max_tokens: int
    temperature: float
    """0 is greedy."""
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0
    keeps_sets: bool = True
    """With `top_k`: the sets that tokens are sampled from are kept, see `Completion.kept`."""
    keeps_routes: bool = True
    """The experts of tokens are kept, see `Completion.routes`, if the engine says them."""
    min_p: float = 0.0
    regex: str | None = None
    """An expression that completions match; only for engines that were started with a tokenizer."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion, and stay in it; only for engines that were started with a tokenizer."""
    prompt_logprobs: int | None = None
    """Of the prompts' tokens the log-probabilities are asked for, and those of so many likeliest ones at their places; None: nothing is."""

    @property
    def has_sets(self) -> bool:
        """Whether completions hold the sets that their tokens were sampled from."""
        return self.keeps_sets and self.top_k > 0

    @property
    def is_timed(self) -> bool:
        """Whether an engine's batches depend on time: on when a text is found, or the grammar of an expression is ready."""
        return bool(self.stop_strings) or self.regex is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts for one engine."""

    numbers: np.ndarray
    """`[prompts]` int64, unique among all that the engine is given."""
    tokens: np.ndarray
    """`[sum(len)]` int32, prompts end to end."""
    cu_seqlens: np.ndarray
    """`[prompts + 1]` int64."""
    sampling: Sampling
    seeds: np.ndarray | None = None
    """`[prompts]` int64: one random stream per prompt; None: all draw from the sampler's stream, see `Engine.seed`."""
    max_tokens: np.ndarray | None = None
    """`[prompts]` int64: a limit for each prompt; None: the sampling's for all."""
    salts: np.ndarray | None = None
    """`[prompts]` int64: prompts with the same salt share the engine's cache; None: their numbers, so that no two share it."""
    starts: np.ndarray | None = None
    """`[prompts]` int64, with `Sampling.prompt_logprobs`: the first token of each prompt that it is asked about, at least 1."""


GATHER_S = 0.02
"""Seconds for which a poll gathers groups, unless there are many engines."""


class Engine(Protocol):
    """One inference engine, at first paused. Calls return at once and take effect in their order; a future raises EngineError
    when the engine's part has failed."""

    ready: Future[None]
    """Done when the engine has loaded its model."""

    def submit(self, batch: PromptBatch) -> Future[None]:
        """Queue prompts, which are sampled as soon as the engine is not paused and has room."""

    def poll(self, gather_s: float = GATHER_S) -> Future[Completions]:
        """The groups that have finished and were not handed over, once there is one.

        Args:
            gather_s: seconds to wait for more groups after the first one, while others are being sampled.
        """

    def pause(self, how: Pause) -> Future[None]:
        """Sample no more."""

    def resume(self) -> Future[None]:
        """Sample the prompts that are or will be queued; an error after a weight update that did not complete."""

    def sleep(self) -> Future[None]:
        """Pause, and give up the devices' memory: the weights, which must be received before it resumes, and the cache.
        Completions that have begun are kept and computed again."""

    def abort(self) -> Future[None]:
        """End all groups: `poll` hands them over with the tokens so far and finish reason "abort"."""

    def withdraw(self, numbers: Sequence[int]) -> Future[None]:
        """End the groups of these numbers that have not finished, as `abort` does: nobody reads them."""

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        """Join the weight-transfer group that the learners are joining at the same time."""

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        """While paused: take over the weights that the learners are sending, report their digests on `check`, and seed the
        sampler."""

    def seed(self, seed: int) -> Future[None]:
        """While paused: seed the sampler; the weights stay."""

    def ping(self) -> Future[None]:
        """A sign of life, soon unless the engine takes over weights. Takes no turn among the other calls."""

    def close(self) -> None:
        """End the engine's processes, also those that hang; calls that have not been answered fail."""
