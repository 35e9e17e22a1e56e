"""Micro-batches: packs as tensors on this rank's device, with the results of earlier passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from mgrpo.layout import Layout
from mgrpo.ops import KeptSets
from mgrpo.parallel import backend
from mgrpo.parallel.packs import PackedDocuments, describe
from mgrpo.policy.model import ResponseRows
from mgrpo.policy.routing import Routing
from mgrpo.types import KeptTokens, PackedBatch


@dataclass(frozen=True, slots=True)
class PackTensors:
    """The arrays of a pack that a loss needs, on the device; fields as in `PackedBatch`."""

    advantages: torch.Tensor
    loss_mask: torch.Tensor
    response_cu_seqlens: torch.Tensor
    rollout_logprobs: torch.Tensor
    ages: torch.Tensor | None
    """None: all 0."""


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
    """From the score of the policy that `scores_entropy`, `[responses]`."""
    keep: torch.Tensor | None = None
    """`[responses]`, a factor of the loss's policy term."""
    routing: Routing = field(default_factory=dict)
    """The experts chosen in the score that recorded them; replayed in training."""


Reported = TypeVar("Reported")
"""The report of a loss function about one micro-batch, besides the loss."""

MicrobatchLoss = Callable[[torch.Tensor, torch.Tensor, Microbatch], tuple[torch.Tensor, Reported]]
"""(logprobs [responses], entropy [responses], micro-batch) -> (loss / global denominator, anything to report)."""


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
            advantages=backend.to_device(pack.advantages, np.float32),
            loss_mask=backend.to_device(pack.loss_mask, np.bool_),
            response_cu_seqlens=backend.to_device(pack.response_cu_seqlens, np.int32),
            rollout_logprobs=backend.to_device(pack.rollout_logprobs, np.float32),
            ages=backend.to_device(pack.ages, np.uint8) if pack.ages.any() else None,
        ),
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
