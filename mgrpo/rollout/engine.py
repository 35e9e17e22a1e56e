"""Interface of an inference engine, independent of its implementation. Standard library and numpy only.

An engine is paused, or samples its queued prompts and returns groups as they finish. While paused it receives new weights, in a
transfer group that it has joined together with the learners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
UNSYNCED = -1
"""Policy version of weights that an engine has loaded itself."""

Completions = dict[str, np.ndarray]
"""The completions of finished groups, group by group, sample by sample: `numbers [groups]` int64 are the numbers of the
prompts, `sizes [groups]` int64 counts samples. `tokens` int32, `logprobs` float32 and `policy_versions` int32
`[sum(len)]` are cut by `cu_seqlens [samples + 1]` int64; `finish_reasons [samples]` int8 indexes FINISH_REASONS.

Under `Sampling.has_sets` also the sampling masks of `Completion.kept`: `kept_ids` int32, and the size of each token's set, `kept_sizes
[sum(len)]` int32, 0 if the engine does not return the whole set.

With `Sampling.keeps_routes`, from engines that return routed experts, also `Completion.routes` end to end: `routes [sum(route_sizes),
MoE layers, top_k]`, and the number of tokens of each sample that have them, `route_sizes [samples]` int64: the prompt's and its own
except the last, or none.

With speculative decoding also `drafts [3]` int64: numbers of drafts, of drafted tokens and of accepted tokens since the last answer.

Under `Sampling.prompt_logprobs` also the prompts' log-probabilities: `prompt_sizes [groups]` int64 counts the scored tokens,
`prompt_logprobs [sum(sizes)]` float32 are their own, `prompt_ids` int32 and `prompt_likeliest` float32 `[sum(sizes), k]` the likeliest
at their places, padded with -1 and NaN.

For refused requests also their numbers, `refused [requests]` int64, and the engine's reasons, `refusals [requests]` text. If no group
has finished, the only other entry is an empty `numbers`."""

Pause = Literal["drain", "recompute", "keep"]
"""Treatment of completions that have begun. drain samples them to their end before the pause. Otherwise they continue after it:
recompute drops their cache, which the engine computes again with its new weights, keep continues with keys and values of the old
ones."""


class EngineError(RuntimeError):
    """An engine failed, died or did not answer in time."""


class WrongAnswerError(EngineError):
    """An engine's answer does not fit the request. The engine is not restarted: later answers would not fit either."""


class RefusedError(EngineError):
    """A request that every engine would refuse. It alone fails, and is sent to no other engine."""


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
    """With `top_k`: return the sampling masks of tokens, see `Completion.kept`."""
    keeps_routes: bool = True
    """Return the routed experts of tokens, see `Completion.routes`, if the engine supports it."""
    min_p: float = 0.0
    regex: str | None = None
    """An expression that completions match; only for engines that were started with a tokenizer."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion, and stay in it; only for engines that were started with a tokenizer."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens to return at each prompt token, with their and its own log-probabilities; None: no log-probabilities."""

    @property
    def has_sets(self) -> bool:
        """True if completions contain sampling masks."""
        return self.keeps_sets and self.top_k > 0

    @property
    def is_timed(self) -> bool:
        """True if an engine's batches depend on timing: of finding a text, or of compiling the grammar of an expression."""
        return bool(self.stop_strings) or self.regex is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts for one engine."""

    numbers: np.ndarray
    """`[prompts]` int64, unique per engine."""
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
    """`[prompts]` int64, with `Sampling.prompt_logprobs`: first scored token of each prompt, at least 1."""


GATHER_S = 0.02
"""Seconds in which a poll gathers groups, longer with many engines."""


class Engine(Protocol):
    """One inference engine, initially paused. Calls return at once and take effect in order; a future raises EngineError if the
    call has failed."""

    ready: Future[None]
    """Done when the engine has loaded its model."""

    def submit(self, batch: PromptBatch) -> Future[None]:
        """Queue prompts, which are sampled once the engine is not paused and has room."""

    def poll(self, gather_s: float = GATHER_S) -> Future[Completions]:
        """The finished groups that were not returned yet, once there is one.

        Args:
            gather_s: seconds to wait for more groups after the first one, while others are being sampled.
        """

    def pause(self, how: Pause) -> Future[None]:
        """Stop sampling."""

    def resume(self) -> Future[None]:
        """Sample queued and later prompts; an error after an incomplete weight update."""

    def sleep(self) -> Future[None]:
        """Pause, and release the devices' memory: the weights, which must be received before it resumes, and the cache.
        Completions that have begun are kept and computed again."""

    def abort(self) -> Future[None]:
        """End all groups: `poll` returns them with the tokens so far and finish reason "abort"."""

    def withdraw(self, numbers: Sequence[int]) -> Future[None]:
        """Cancel the unfinished groups of these numbers, as `abort` does."""

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        """Join the weight-transfer group that the learners are joining at the same time."""

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        """While paused: receive the weights that the learners are sending, report their digests on `check`, and seed the
        sampler."""

    def seed(self, seed: int) -> Future[None]:
        """While paused: seed the sampler; the weights stay."""

    def ping(self) -> Future[None]:
        """Answer soon, unless the engine receives weights. Not ordered with the other calls."""

    def close(self) -> None:
        """End the engine's processes, even if they hang; unanswered calls fail."""
