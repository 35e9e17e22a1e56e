"""The places of samples in one training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from mgrpo.packing.bins import check_pack_length
from mgrpo.packing.cost import Cost
from mgrpo.packing.document import documents, taught_length
from mgrpo.packing.lengths import Documents, completion_numbers, rounded_up, sample_lengths, sums
from mgrpo.packing.rank_balance import balance, mini_batches
from mgrpo.types import TrainSample

StepPlan = list[list[list[Documents]]]
"""The documents of each pack, as [mini-batch][data-parallel rank][micro-batch]; a dummy pack has none."""


def plan_step(
    samples: Sequence[TrainSample],
    *,
    pack_length: int,
    dp: int,
    num_mini_batches: int,
    multiple_of: int,
    share_prompts: bool | Literal["auto"],
    document_multiple_of: int = 1,
    micro_batches_multiple_of: int = 1,
    cost: Cost | None = None,
) -> StepPlan:
    """Every sample in exactly one document of one pack, see `balance`; reads lengths and prompts only.

    A pack holds its documents both with the policy's prompts and with the teachers'.

    Args:
        samples: of the whole step.
        pack_length: most tokens in a pack, a multiple of `multiple_of`; `Layout.round_up` makes it one.
        dp: data-parallel ranks.
        num_mini_batches: optimizer steps.
        multiple_of: packs are padded to a multiple of this many tokens, see `Layout`; 1 for one rank.
        document_multiple_of: the same of each document.
        micro_batches_multiple_of: the number of micro-batches is rounded up to a multiple of this, see `Layout`.
        share_prompts: see `documents`.
        cost: of a document, default `Cost()`.
    Returns:
        The documents of each pack, for `to_slices`.
    Raises:
        ValueError: a sample is longer than a pack, or `pack_length` is not such a multiple.
    """
    assert multiple_of % document_multiple_of == 0, "the padding at a pack's end is also a document"
    if document_multiple_of > 1:
        if share_prompts is True:
            raise ValueError(
                "documents with shared prompts cannot be split over context-parallel ranks; use "
                "shared_prompt_packing=auto or off, or context_parallel_size=1"
            )
        share_prompts = False
    check_pack_length(pack_length, multiple_of)
    prompts, rows = sample_lengths(samples)
    plan = []
    for members in _mini_batches(samples, prompts + rows, num_mini_batches):
        own = [samples[index] for index in members]
        grouped = [
            [members[number] for number in chosen]
            for chosen in documents(own, share_prompts=share_prompts, pack_length=pack_length, cost=cost)
        ]
        heads = [chosen[0] for chosen in grouped]
        order = [index for chosen in grouped for index in chosen]
        lengths = rounded_up(
            prompts[heads] + sums(rows[order], [len(chosen) for chosen in grouped]), document_multiple_of
        )
        if any(sample.teacher_prompt is not None for sample in own):
            taught = [taught_length(samples, chosen, multiple_of=document_multiple_of) for chosen in grouped]
            lengths = np.maximum(lengths, taught)
        (ranks,) = balance(
            lengths.tolist(),
            pack_length,
            dp=dp,
            multiple_of=multiple_of,
            micro_batches_multiple_of=micro_batches_multiple_of,
            cost=cost,
        )
        plan.append([[[grouped[index] for index in chosen] for chosen in row] for row in ranks])
    return plan


def _mini_batches(samples: Sequence[TrainSample], lengths: np.ndarray, num_mini_batches: int) -> list[list[int]]:
    """The samples of each optimizer step: whole groups, or single completions where there are too few of them.

    It depends on the samples alone, not on the layout's padding or on shared prompts.

    Args:
        lengths: `[samples]`, tokens of each as a separate document.
    """
    by_group: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        by_group.setdefault(sample.group, []).append(index)
    units = list(by_group.values())
    if len(units) < num_mini_batches:
        numbers = completion_numbers(samples)
        units = [part.tolist() for part in np.split(np.arange(len(samples)), np.flatnonzero(np.diff(numbers)) + 1)]
    each = lengths.tolist()
    parts = mini_batches([sum(each[index] for index in unit) for unit in units], num_mini_batches)
    return [sorted(index for number in part for index in units[number]) for part in parts]
