"""Samples into documents, and documents into one pack.

A document is a prompt followed by the completions that share it, each without its last token (`PackedBatch` in
types), and padding where ranks share its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from mgrpo.packing.cost import Cost
from mgrpo.packing.lengths import cumulative
from mgrpo.types import KeptTokens, PackedBatch, Routes, TeacherScores, TrainSample, lengthened, unrouted


def documents(
    samples: Sequence[TrainSample],
    *,
    share_prompts: bool | Literal["auto"],
    pack_length: int,
    cost: Cost | None = None,
) -> list[list[int]]:
    """The samples that form each document, as indices; every sample in exactly one.

    Samples of a group with equal prompts become one document if it is not longer than `pack_length`, also as their teacher
    reads it: with True always, with "auto" where that is cheaper, with False never. Every other sample is one document.

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
        longest = max(document_length(samples, members), taught_length(samples, members))
        fits = longest <= pack_length
        if fits and (share_prompts is True or _sharing_pays(samples, members, cost or Cost())):
            found.append(members)
        else:
            found.extend([index] for index in members)
    return found


def _sharing_pays(samples: Sequence[TrainSample], members: list[int], cost: Cost) -> bool:
    """True if one document with branches costs less than a document for each sample.

    It repeats no prompt, but its mask is dense, so that attention pays for the columns of all branches: (p + g r)^2
    instead of g (p + r)^2 with g completions of r tokens.
    """
    apart = sum(cost.of(document_length(samples, [index])) for index in members)
    return cost.of(document_length(samples, members)) < apart


def document_length(
    samples: Sequence[TrainSample] | Mapping[int, TrainSample], members: Sequence[int], *, multiple_of: int = 1
) -> int:
    """Tokens of the document these samples form, padded to a multiple of `multiple_of`."""
    length = len(samples[members[0]].prompt_tokens) + sum(len(samples[index].tokens) - 1 for index in members)
    return -(-length // multiple_of) * multiple_of


def as_taught(sample: TrainSample) -> TrainSample:
    """Sample with its teacher's prompt, without routes."""
    prompt = sample.prompt_tokens if sample.teacher_prompt is None else sample.teacher_prompt
    return replace(sample, prompt_tokens=prompt, routes=None)


def taught_documents(
    samples: Sequence[TrainSample] | Mapping[int, TrainSample], members: Sequence[int]
) -> list[list[int]]:
    """The documents of these samples as their teacher reads them: it may read other prompts, several in place of a shared one.

    Those that have no teacher are left out.
    """
    found: list[list[int]] = []
    last: np.ndarray | None = None
    for index in members:
        if samples[index].teacher < 0:
            continue
        prompt = as_taught(samples[index]).prompt_tokens
        if last is prompt or (last is not None and np.array_equal(last, prompt)):
            found[-1].append(index)
        else:
            found.append([index])
        last = prompt
    return found


def taught_length(
    samples: Sequence[TrainSample] | Mapping[int, TrainSample], members: Sequence[int], *, multiple_of: int = 1
) -> int:
    """Tokens of these documents, each padded to a multiple of `multiple_of`."""
    return sum(
        document_length({index: as_taught(samples[index]) for index in own}, own, multiple_of=multiple_of)
        for own in taught_documents(samples, members)
    )


def assemble(
    samples: Sequence[TrainSample] | Mapping[int, TrainSample],
    documents: Sequence[Sequence[int]],
    *,
    multiple_of: int = 1,
    document_multiple_of: int = 1,
) -> PackedBatch:
    """One pack of these documents, in their order; no documents make a dummy pack.

    Padding up to a multiple of `document_multiple_of` continues a document's last branch with token 0: no earlier row
    attends to it, and it predicts nothing. Padding of the pack up to a multiple of `multiple_of` is one document of token 0
    that predicts nothing; a dummy pack is such a document alone, so that every rank has something to run. A pack without a
    sample that has a teacher has no `teachers`, and one without teacher scores no `taught`.
    """
    # A segment is a prompt or a completion without its last token: a run of consecutive rows.
    segments: list[np.ndarray] = []
    branches: list[int] = []
    prompts: list[int] = []
    order: list[int] = []
    for members in documents:
        prompts.append(len(segments))
        segments.append(samples[members[0]].prompt_tokens)
        segments.extend([samples[index].tokens[:-1] for index in members])
        num_missing = -document_length(samples, members) % document_multiple_of
        segments[-1] = np.pad(segments[-1], (0, num_missing))
        branches.extend(range(len(members) + 1))
        order.extend(members)

    chosen = [samples[index] for index in order]
    starts = cumulative([len(segment) for segment in segments])
    response_lengths = [len(sample.tokens) for sample in chosen]
    num_tokens = int(starts[-1])
    num_padding = -num_tokens % multiple_of if num_tokens else multiple_of
    padding = np.arange(num_padding, dtype=np.int32)
    positions, rows = _positions_and_rows(starts, response_lengths, np.array(branches, dtype=np.int32), prompts)
    is_predicted = _joined([sample.is_predicted for sample in chosen], np.bool_)
    by_token = [sample.token_advantages for sample in chosen if sample.token_advantages is not None]
    targets = _joined([sample.tokens for sample in chosen], np.int32)[is_predicted]
    document_ends = [*starts[prompts], num_tokens, *([num_tokens + num_padding] if num_padding else [])]
    return PackedBatch(
        tokens=_joined([*segments, np.zeros_like(padding)], np.int32),
        positions=_joined([positions, padding], np.int32),
        branches=_joined(
            [np.repeat(np.array(branches, dtype=np.int32), np.diff(starts)), np.zeros_like(padding)], np.int32
        ),
        cu_seqlens=np.array(document_ends, dtype=np.int32),
        rows=rows[is_predicted].astype(np.int32),
        targets=targets,
        response_cu_seqlens=cumulative(is_predicted)[cumulative(response_lengths)].astype(np.int32),
        loss_mask=_joined([sample.loss_mask for sample in chosen], np.bool_)[is_predicted],
        rollout_logprobs=_joined([sample.rollout_logprobs for sample in chosen], np.float32)[is_predicted],
        ages=_joined(
            [np.zeros(len(sample.tokens), np.uint8) if sample.ages is None else sample.ages for sample in chosen],
            np.uint8,
        )[is_predicted],
        advantages=(
            np.array([sample.advantage for sample in chosen], dtype=np.float32)
            if len(by_token) < len(chosen)
            else _joined(by_token, np.float32)[is_predicted]
        ),
        samples=np.array(order, dtype=np.int32),
        kept=_kept(chosen, is_predicted, targets),
        teachers=(
            np.array([sample.teacher for sample in chosen], dtype=np.int8)
            if any(sample.teacher >= 0 for sample in chosen)
            else None
        ),
        taught=_taught(chosen, is_predicted),
        routes=_routes(samples, documents, num_tokens + num_padding, document_multiple_of),
    )


def _routes(
    samples: Sequence[TrainSample] | Mapping[int, TrainSample],
    documents: Sequence[Sequence[int]],
    num_tokens: int,
    document_multiple_of: int,
) -> Routes | None:
    """Routes of all tokens in their order; see `assemble` for the padding."""
    parts: list[Routes] = []
    for members in documents:
        for number, index in enumerate(members):
            sample, own = samples[index], samples[index].routes
            if own is None:
                continue
            prompt = len(sample.prompt_tokens)
            assert len(own) == prompt + len(sample.tokens) - 1, "a row for each token that is read"
            parts.append(own if number == 0 else own[prompt:])
        if parts:
            parts.append(unrouted(-document_length(samples, members) % document_multiple_of, parts[0]))
    return lengthened(np.concatenate(parts), num_tokens) if parts else None


def _taught(samples: Sequence[TrainSample], is_predicted: np.ndarray) -> TeacherScores | None:
    known = next((sample.taught for sample in samples if sample.taught is not None), None)
    if known is None:
        return None
    parts = [sample.taught or TeacherScores.none(len(sample.tokens), known.num_likeliest) for sample in samples]
    return TeacherScores.joined(parts).part(is_predicted)


def _kept(samples: Sequence[TrainSample], is_predicted: np.ndarray, targets: np.ndarray) -> KeptTokens | None:
    """Sets of the predicted tokens. A token without one is not trained; its own id stands in, so that its logprob is defined."""
    sets = [sample.kept for sample in samples if sample.kept is not None]
    assert len(sets) in (0, len(samples)), "all samples of a step have sets, or none has"
    return KeptTokens.joined(sets).where(is_predicted).filled(targets) if sets else None


def _positions_and_rows(
    starts: np.ndarray, response_lengths: list[int], branches: np.ndarray, prompts: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Position of each row in its branch `[tokens]`, and the row that predicts each token of a completion.

    Args:
        starts, branches: first row `[segments + 1]` and branch `[segments]` of each segment, 0 for a prompt.
        response_lengths: tokens of each completion.
        prompts: which segments are prompts; the completions of each follow it.
    """
    lengths, response_starts = np.diff(starts), cumulative(response_lengths)
    heads = np.array(prompts, dtype=np.int64)
    fan_out = np.diff(np.append(heads, len(lengths))) - 1
    assert np.all(lengths[heads] > 0), "a prompt without tokens: nothing would predict the first response token"
    assert all(response_lengths), "a sample without response tokens"

    is_completion = branches > 0
    # Row i of a segment that starts at row s and continues at position f has position i - s + f, with f = 0 for a
    # prompt and the prompt's length for a completion.
    first_positions = np.where(is_completion, np.repeat(lengths[heads], fan_out + 1), 0)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - first_positions, lengths)
    # Response token j is predicted by the row of token j - 1 of its branch, and token 0 by the prompt's last row.
    rows = np.arange(response_starts[-1]) - np.repeat(
        response_starts[:-1] - starts[:-1][is_completion] + 1, response_lengths
    )
    rows[response_starts[:-1]] = np.repeat(starts[heads + 1] - 1, fan_out)
    return positions, rows


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    if not arrays:
        return np.zeros(0, dtype=dtype)
    return np.concatenate(arrays, dtype=dtype, casting="same_kind")
