"""Packs as far as lengths alone decide them: rank 0 plans and measures a step without laying out a token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from mgrpo.types import PackLengths, TrainSample

Documents = list[list[int]]
"""The documents of a pack, each as the samples that form it."""


def sample_lengths(samples: Sequence[TrainSample]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each sample's prompt and of its completion, which is one row shorter than the response; int64."""
    prompts = np.fromiter((len(sample.prompt_tokens) for sample in samples), np.int64, len(samples))
    responses = np.fromiter((len(sample.tokens) for sample in samples), np.int64, len(samples))
    return prompts, responses - 1


def completion_numbers(samples: Sequence[TrainSample]) -> np.ndarray:
    """`[samples]` int32: which completion each belongs to, counted from 0; its branches follow each other."""
    begins = np.fromiter((not sample.continues for sample in samples), np.bool_, len(samples))
    return (np.cumsum(begins) - 1).astype(np.int32)


def pack_lengths(
    samples: Sequence[TrainSample], packs: Sequence[Documents], *, multiple_of: int, document_multiple_of: int
) -> PackLengths:
    """The lengths in these packs as `assemble` lays them out."""
    prompts, rows = sample_lengths(samples)
    documents = list(chain.from_iterable(packs))
    heads = [members[0] for members in documents]
    order = list(chain.from_iterable(documents))
    branches = np.array([len(members) for members in documents], dtype=np.int64)
    # Padding of a document continues its last branch.
    last = cumulative(branches)[1:] - 1
    starts, lengths = np.repeat(prompts[heads], branches), rows[order]
    unpadded = prompts[heads] + sums(lengths, branches)
    lengths[last] += rounded_up(unpadded, document_multiple_of) - unpadded

    pack_rows = sums(rounded_up(unpadded, document_multiple_of), [len(own) for own in packs])
    padding = np.where(pack_rows, rounded_up(pack_rows, multiple_of) - pack_rows, multiple_of)
    prompt_runs, branch_runs, padding_runs = (
        np.stack(np.broadcast_arrays(first, length), axis=1)
        for first, length in ((0, prompts[heads]), (starts, lengths), (0, padding))
    )
    runs = np.concatenate([prompt_runs, branch_runs, padding_runs])
    return PackLengths(
        runs=runs,
        responses=sum(samples[index].num_predicted for index in order),
        padding=int(runs[:, 1].sum() - unpadded.sum()),
        filled=sum(map(bool, packs)),
    )


def cumulative(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """`[lengths + 1]` int64: where each part starts when they are laid end to end, and the total."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def sums(values: np.ndarray, counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """The sums of the first counts[0] values, the next counts[1] and so on; int64, 0 for none."""
    return np.diff(cumulative(values)[cumulative(counts)])


def rounded_up(lengths: np.ndarray, multiple_of: int) -> np.ndarray:
    """Each up to a multiple."""
    return -(-lengths // multiple_of) * multiple_of
