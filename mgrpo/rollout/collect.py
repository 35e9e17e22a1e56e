"""From prompts to the engines' flat arrays and back to groups; the seeds of sampling."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from mgrpo.rollout.engine import FINISH_REASONS, Completions
from mgrpo.types import Completion, KeptTokens, Prompt, RolloutGroup

Decode = Callable[[Sequence[np.ndarray]], list[str]]
"""Token arrays -> texts."""


EVALUATION = -1
"""Evaluations draw from one stream, whenever they run: it changes only with the seed of the run."""


def seed_of(*words: object) -> int:
    """A 62-bit seed derived from `words`."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def sampler_seed(run_seed: int, step: int, engine: int) -> int:
    """The seed of an engine's sampler for a training step.

    On a CPU an engine's sampler is seeded before each step and draws for all rows of a batch from one stream: no two prompts,
    steps or samples share their randomness, a run repeats, also when it was resumed, and engines need no generator per
    request, which is slow there. On GPUs every prompt has its own seed, see `Fleet.seeds_prompts`.
    """
    return seed_of(run_seed, step, engine)


def to_arrays(tokens: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """`tokens` and `cu_seqlens` of a `PromptBatch`."""
    cu_seqlens = np.concatenate(([0], np.cumsum([len(t) for t in tokens]))).astype(np.int64)
    return np.concatenate([np.zeros(0, dtype=np.int32), *tokens]).astype(np.int32), cu_seqlens


def _kept(arrays: Completions) -> KeptTokens | None:
    return KeptTokens.of_sizes(arrays["kept_ids"], arrays["kept_sizes"]) if "kept_ids" in arrays else None


def to_groups(prompts: Sequence[Prompt], arrays: Completions, decode: Decode) -> list[RolloutGroup]:
    """Cut what an engine returned for `prompts` into groups, and decode each completion once."""
    cuts = list(itertools.pairwise(arrays["cu_seqlens"].tolist()))
    sets = _kept(arrays)
    texts = decode([arrays["tokens"][a:b] for a, b in cuts])
    completions = iter(
        Completion(
            tokens=arrays["tokens"][a:b],
            logprobs=arrays["logprobs"][a:b],
            policy_versions=arrays["policy_versions"][a:b],
            finish_reason=FINISH_REASONS[reason],
            text=text,
            kept=sets and sets.part(a, b),
        )
        for (a, b), text, reason in zip(cuts, texts, arrays["finish_reasons"].tolist(), strict=True)
    )
    return [
        RolloutGroup(prompt=prompt, completions=tuple(itertools.islice(completions, size)))
        for prompt, size in zip(prompts, arrays["sizes"].tolist(), strict=True)
    ]
