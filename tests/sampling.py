"""Batches of prompts for an engine by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mgrpo.rollout.engine import Completions, Engine, PromptBatch, Sampling
from mgrpo.types import KeptTokens


def prompt_batch(
    prompts: Sequence[np.ndarray],
    sampling: Sampling,
    *,
    first: int = 0,
    seeds: np.ndarray | None = None,
    starts: np.ndarray | None = None,
) -> PromptBatch:
    """Prompts with consecutive numbers."""
    return PromptBatch(
        numbers=np.arange(first, first + len(prompts)),
        tokens=np.concatenate(prompts).astype(np.int32),
        cu_seqlens=np.concatenate(([0], np.cumsum([len(prompt) for prompt in prompts]))).astype(np.int64),
        sampling=sampling,
        seeds=seeds,
        starts=starts,
    )


def sampled(engine: Engine, batch: PromptBatch, timeout_s: float = 60) -> Completions:
    """What an engine that is paused samples, in the order of the prompts; it is paused again."""
    engine.submit(batch)
    engine.resume().result(timeout_s)
    answer = collected(engine, len(batch.numbers), timeout_s)
    engine.pause("recompute").result(timeout_s)
    return answer


def collected(engine: Engine, num_groups: int, timeout_s: float = 60) -> Completions:
    """The next so many groups that an engine finishes, ordered by number."""
    answers = []
    while num_groups > 0:
        answers.append(engine.poll().result(timeout_s))
        num_groups -= len(answers[-1]["numbers"])
    groups = [group for answer in answers for group in _groups(answer)]
    groups.sort(key=lambda group: int(group["numbers"][0]))
    joined = {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}
    return joined | {"cu_seqlens": np.concatenate(([0], np.cumsum(joined.pop("lengths"))))}


def _groups(answer: Completions) -> list[Completions]:
    """Group by group, with `lengths` instead of `cu_seqlens`."""
    groups, first = [], 0
    sets = KeptTokens.of_sizes(answer["kept_ids"], answer["kept_sizes"]) if "kept_ids" in answer else None
    for number, size in zip(answer["numbers"], answer["sizes"], strict=True):
        cuts = answer["cu_seqlens"][first : first + size + 1]
        tokens = slice(cuts[0], cuts[-1])
        own = sets and sets.part(cuts[0], cuts[-1])
        groups.append(
            {
                "numbers": np.array([number]),
                "sizes": np.array([size]),
                **{name: answer[name][tokens] for name in ("tokens", "logprobs", "policy_versions")},
                "finish_reasons": answer["finish_reasons"][first : first + size],
                "lengths": np.diff(cuts),
                **({"kept_ids": own.ids, "kept_sizes": own.sizes} if own else {}),
            }
        )
        first += size
    return groups
