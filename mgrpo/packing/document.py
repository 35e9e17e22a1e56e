"""Samples into documents, and documents into one pack.

A document is a prompt followed by the completions that share it, each without its last token (`PackedBatch` in types.py),
and padding where ranks share its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from mgrpo.packing.cost import Cost
from mgrpo.types import PackedBatch, TrainSample


def documents(
    samples: Sequence[TrainSample],
    *,
    share_prompts: bool | Literal["auto"],
    pack_length: int,
    cost: Cost | None = None,
) -> list[list[int]]:
    """Which samples form a document, as indices; every sample in exactly one.

    Samples of a group with equal prompts become one document if it is not longer than `pack_length`: with True always,
    with "auto" where that is cheaper, with False never. Each other sample is a document.

    Args:
        cost: of a document, for "auto"; default `Cost()`.
    """
    if share_prompts is False:
        return [[index] for index in range(len(samples))]
    groups: dict[tuple[int, bytes], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault((sample.group, sample.prompt_tokens.tobytes()), []).append(index)
    found: list[list[int]] = []
    for members in groups.values():
        fits = document_length(samples, members) <= pack_length
        if fits and (share_prompts is True or _sharing_pays(samples, members, cost or Cost())):
            found.append(members)
        else:
            found.extend([index] for index in members)
    return found


def _sharing_pays(samples: Sequence[TrainSample], members: list[int], cost: Cost) -> bool:
    """Whether one document with branches costs less than a document for each sample.

    It repeats no prompt, but its mask is dense, so that attention pays for the columns of all branches: (p + g r)^2
    instead of g (p + r)^2 with g completions of r tokens.
    """
    apart = sum(cost.of(document_length(samples, [index])) for index in members)
    return cost.of(document_length(samples, members)) < apart


def document_length(samples: Sequence[TrainSample], members: Sequence[int], *, multiple_of: int = 1) -> int:
    """Tokens of the document these samples form, padded to a multiple of `multiple_of`."""
    length = len(samples[members[0]].prompt_tokens) + sum(len(samples[index].tokens) - 1 for index in members)
    return -(-length // multiple_of) * multiple_of


def assemble(
    samples: Sequence[TrainSample],
    documents: Sequence[Sequence[int]],
    *,
    multiple_of: int = 1,
    document_multiple_of: int = 1,
) -> PackedBatch:
    """One pack of these documents, in their order; no documents make a dummy pack.

    A document's last branch is continued with token 0 to a multiple of `document_multiple_of`: nothing before sees it,
    and it predicts nothing. What is missing to a multiple of `multiple_of` tokens is added as one document of token 0 that
    predicts nothing; a dummy pack is such a document alone, so that every rank has something to run.
    """
    # A segment is a prompt or a completion without its last token: a run of consecutive rows.
    segments: list[np.ndarray] = []
    branches: list[int] = []
    prompt_segments: list[int] = []
    order: list[int] = []
    for members in documents:
        prompt_segments.append(len(segments))
        segments.append(samples[members[0]].prompt_tokens)
        segments.extend([samples[index].tokens[:-1] for index in members])
        num_missing = -document_length(samples, members) % document_multiple_of
        segments[-1] = np.pad(segments[-1], (0, num_missing))
        branches.extend(range(len(members) + 1))
        order.extend(members)

    segment_branches = np.array(branches, dtype=np.int32)
    segment_starts = _cumulative(segments)
    segment_lengths = np.diff(segment_starts)
    fan_out = np.array([len(members) for members in documents], dtype=np.int64)
    chosen = [samples[index] for index in order]
    response_starts = _cumulative([sample.tokens for sample in chosen])
    response_lengths = np.diff(response_starts)
    prompts = np.array(prompt_segments, dtype=np.int64)
    assert np.all(segment_lengths[prompts] > 0), (
        "a prompt without tokens: nothing would predict the first response token"
    )
    assert np.all(response_lengths > 0), "a sample without response tokens"

    num_tokens = int(segment_starts[-1])
    num_padding = -num_tokens % multiple_of if num_tokens else multiple_of
    padding = np.arange(num_padding, dtype=np.int32)

    is_completion = segment_branches > 0
    prompt_ends = segment_starts[prompts + 1]
    # Row i of a segment that starts at row s and continues at position f has position i - s + f, with f = 0 for a prompt
    # and the prompt's length for a completion.
    first_positions = np.where(is_completion, np.repeat(segment_lengths[prompts], fan_out + 1), 0)
    positions = np.arange(num_tokens) - np.repeat(segment_starts[:-1] - first_positions, segment_lengths)
    # Response token j is predicted by the row of token j - 1 of its branch, and token 0 by the prompt's last row.
    rows = np.arange(response_starts[-1]) - np.repeat(
        response_starts[:-1] - segment_starts[:-1][is_completion] + 1, response_lengths
    )
    rows[response_starts[:-1]] = np.repeat(prompt_ends - 1, fan_out)

    document_ends = np.append(segment_starts[prompts], num_tokens)
    if num_padding:
        document_ends = np.append(document_ends, num_tokens + num_padding)
    return PackedBatch(
        tokens=_joined([*segments, np.zeros_like(padding)], np.int32),
        positions=_joined([positions, padding], np.int32),
        branches=_joined([np.repeat(segment_branches, segment_lengths), np.zeros_like(padding)], np.int32),
        cu_seqlens=document_ends.astype(np.int32),
        rows=rows.astype(np.int32),
        targets=_joined([sample.tokens for sample in chosen], np.int32),
        response_cu_seqlens=response_starts.astype(np.int32),
        loss_mask=_joined([sample.loss_mask for sample in chosen], np.bool_),
        rollout_logprobs=_joined([sample.rollout_logprobs for sample in chosen], np.float32),
        advantages=np.array([sample.advantage for sample in chosen], dtype=np.float32),
        samples=np.array(order, dtype=np.int32),
    )


def _cumulative(arrays: list[np.ndarray]) -> np.ndarray:
    """`[arrays + 1]` int64: where each array starts when they are laid end to end, and the total."""
    starts = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=starts[1:])
    return starts


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    if not arrays:
        return np.zeros(0, dtype=dtype)
    return np.concatenate(arrays, dtype=dtype, casting="same_kind")
