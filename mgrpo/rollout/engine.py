"""What the rooms above ask of an inference engine, whatever runs it. Standard library and numpy only.

An engine holds batches of prompts until they are taken, samples with its present weights, and takes over new ones in a
transfer group that it joins together with the learners.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
UNSYNCED = -1
"""Policy version of the weights that an engine has loaded by itself."""

Completions = dict[str, np.ndarray]
"""The completions of a batch, prompt by prompt, sample by sample: `tokens` int32, `logprobs` float32 and `policy_versions`
int32 `[sum(len)]`, cut by `cu_seqlens [prompts * num_samples + 1]` int64; `finish_reasons [prompts * num_samples]` int8
indexes FINISH_REASONS."""


class EngineError(RuntimeError):
    """An engine failed, died or did not answer in time."""


class NotFiniteError(EngineError):
    """An engine sampled with log-probabilities that are not finite: its weights are broken, or have diverged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one batch."""

    num_samples: int
    max_tokens: int
    temperature: float
    """0 is greedy."""
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion, and stay in it; only for engines that were started with a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """The prompts that one engine samples together."""

    number: int
    """Unique among the batches of a run."""
    tokens: np.ndarray
    """`[sum(len)]` int32, prompts end to end."""
    cu_seqlens: np.ndarray
    """`[prompts + 1]` int64."""
    sampling: Sampling
    seeds: np.ndarray | None = None
    """`[prompts]` int64: one random stream per prompt; None: all draw from the sampler's stream, see `Engine.seed`."""


class Engine(Protocol):
    """One inference engine. Calls return at once; a future raises EngineError when the engine's part has failed."""

    ready: Future[None]
    """Done when the engine has loaded its model."""

    def submit(self, batch: PromptBatch) -> None:
        """Queue prompts. None of them is sampled before `take`, so they can be queued while learners still train."""

    def take(self, number: int) -> Future[Completions]:
        """Sample a submitted batch with the present weights; an error after a weight update that did not complete."""

    def abort(self) -> Future[None]:
        """End what is being sampled: pending `take` calls answer with the tokens so far and finish reason "abort"."""

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        """Join the weight-transfer group that the learners are joining at the same time."""

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        """Take over the weights that the learners are sending, report their digests on `check`, and seed the sampler."""

    def seed(self, seed: int) -> Future[None]:
        """Seed the sampler; the weights stay."""

    def close(self) -> None:
        """End the engine's processes."""
