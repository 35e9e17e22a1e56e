"""Micro-batches: packs as tensors on this rank's device, with the results of earlier passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch

from mgrpo.layout import Layout
from mgrpo.ops import KeptSets
from mgrpo.parallel import backend
from mgrpo.parallel.packed.packs import PackedDocuments, describe
from mgrpo.policy.model import ResponseRows
from mgrpo.policy.routing import Routing
from mgrpo.types import KeptTokens, PackedBatch, Routes, TeacherScores


@dataclass(frozen=True, slots=True)
class PackTensors:
    """The arrays of a pack that a loss needs, on the device; fields as in `PackedBatch`."""

    targets: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    response_cu_seqlens: torch.Tensor
    rollout_logprobs: torch.Tensor
    ages: torch.Tensor | None
    """None: all 0."""
    teachers: torch.Tensor | None
    """`[responses]` int8, the teacher of each token's sequence, -1: none. None: no sequence has any."""


@dataclass(frozen=True, slots=True)
class Taught:
    """Teacher scores of a micro-batch's response tokens; NaN and -1 where there are none."""

    logprobs: torch.Tensor
    """`[responses]` float32, of the tokens themselves."""
    ids: torch.Tensor | None = None
    """`[responses, k]` int32, its likeliest tokens. None: not requested."""
    likeliest: torch.Tensor | None = None
    """`[responses, k]` float32, the log-probabilities of `ids`."""

    @classmethod
    def of(cls, output: torch.Tensor, num_likeliest: int) -> Taught:
        """From the output of a teacher's pass with `num_likeliest`."""
        if not num_likeliest:
            return cls(output[0])
        logprobs, likeliest, ids = output.split((1, num_likeliest, num_likeliest))
        return cls(logprobs[0], ids.t().to(torch.int32), likeliest.t())


@dataclass(slots=True)
class Microbatch:
    """A pack on this rank's device."""

    pack: PackedBatch
    tokens: torch.Tensor
    positions: torch.Tensor
    documents: PackedDocuments
    response: ResponseRows
    loss_inputs: PackTensors
    logprobs: dict[str, torch.Tensor] = field(default_factory=dict)
    """Earlier scores by the reference ("ref") or by the policy itself ("old"), on the last stage: `[responses]`."""
    entropy: torch.Tensor | None = None
    """`[responses]`, from the score of the policy with `scores_entropy`."""
    keep: torch.Tensor | None = None
    """`[responses]`, a factor of the loss's policy term."""
    taught: Taught | None = None
    """Teacher scores from the pack, or by a teacher on the learners, then on the last stage only. None: no distillation."""
    routing: Routing = field(default_factory=dict)
    """The experts chosen in the score that recorded them; replayed in training."""
    routes: Routes | None = None
    """Routes of the engines for this context rank's tokens, on the host; replayed in the policy's own scores and in training."""

    def with_candidates(self) -> Microbatch:
        """The same, whose teacher's likeliest tokens are scored as well."""
        if self.taught is None or self.taught.ids is None:
            return self
        indices, ids = self.response.indices, self.taught.ids
        candidates = (ids if indices is None else ids[indices]).long()
        return replace(self, response=replace(self.response, candidates=candidates))


Reported = TypeVar("Reported")
"""The report of a loss function about one micro-batch, besides the loss."""

MicrobatchLoss = Callable[..., tuple[torch.Tensor, Reported]]
"""(logprobs [responses], entropy [responses], micro-batch) -> (loss / global denominator, report).

Where the micro-batch's teacher names its likeliest tokens, also the log-probabilities of targets and of these `[responses, 1 + k]`.
"""


def collate(pack: PackedBatch, layout: Layout, *, context_rank: int, temperature: float) -> Microbatch:
    """One pack of this rank's data-parallel slice as a micro-batch."""
    documents = describe(pack.cu_seqlens, pack.positions, pack.branches, rank=context_rank, size=layout.context)
    return Microbatch(
        pack=pack,
        tokens=backend.to_device(pack.tokens[documents.local_queries.tokens], np.int64)[None],
        positions=documents.positions[None],
        documents=documents,
        response=_response_rows(pack, documents, temperature),
        loss_inputs=PackTensors(
            targets=backend.to_device(pack.targets, np.int32),
            advantages=backend.to_device(pack.advantages, np.float32),
            loss_mask=backend.to_device(pack.loss_mask, np.bool_),
            response_cu_seqlens=backend.to_device(pack.response_cu_seqlens, np.int32),
            rollout_logprobs=backend.to_device(pack.rollout_logprobs, np.float32),
            ages=backend.to_device(pack.ages, np.uint8) if pack.ages.any() else None,
            teachers=None if pack.teachers is None else backend.to_device(_by_response(pack, pack.teachers), np.int8),
        ),
        taught=None if pack.taught is None else _taught(pack.taught),
        routes=None if pack.routes is None else pack.routes[documents.local_queries.tokens],
    )


def _by_response(pack: PackedBatch, values: np.ndarray) -> np.ndarray:
    """Each sequence's value at its responses."""
    return np.repeat(values, np.diff(pack.response_cu_seqlens))


def _taught(scores: TeacherScores) -> Taught:
    return Taught(
        logprobs=backend.to_device(scores.logprobs, np.float32),
        ids=None if scores.ids is None else backend.to_device(scores.ids, np.int32),
        likeliest=None if scores.likeliest is None else backend.to_device(scores.likeliest, np.float32),
    )


def _response_rows(pack: PackedBatch, documents: PackedDocuments, temperature: float) -> ResponseRows:
    rows, targets = pack.rows.astype(np.int64), pack.targets.astype(np.int64)
    if documents.gathered_rows is None:
        return ResponseRows(
            backend.to_device(rows, np.int64),
            backend.to_device(targets, np.int64),
            temperature,
            kept=_kept_sets(pack.kept),
        )
    local_tokens = documents.local_queries.tokens
    local_row = np.full(len(pack.tokens), -1)
    local_row[local_tokens] = np.arange(len(local_tokens))
    is_local = local_row[rows] >= 0
    indices = np.flatnonzero(is_local)
    return ResponseRows(
        backend.to_device(local_row[rows[indices]], np.int64),
        backend.to_device(targets[indices], np.int64),
        temperature,
        indices=backend.to_device(indices, np.int64),
        num_responses=len(rows),
        kept=_kept_sets(pack.kept and pack.kept.where(is_local)),
    )


def _kept_sets(kept: KeptTokens | None) -> KeptSets | None:
    if kept is None:
        return None
    return KeptSets(backend.to_device(kept.ids, np.int32), backend.to_device(kept.offsets, np.int32))
