"""Frequencies of rotary position embeddings."""

from __future__ import annotations

import math

import torch

from mgrpo.models.rope import Rope


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """`[head_dim / 2]` float32: by how much each pair of dimensions turns from one position to the next."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling == "default":
        return plain
    kept = _kept_share(rope, plain, head_dim)
    return plain * (kept + (1 - kept) / rope.factor)


def _kept_share(rope: Rope, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[head_dim / 2]`: 1 where a frequency stays, 0 where it is divided by the factor."""
    if rope.scaling == "linear":
        return torch.zeros_like(plain)
    if rope.scaling == "llama3":
        turns = rope.original_positions * plain / (2 * math.pi)
        return ((turns - rope.slow) / (rope.fast - rope.slow)).clamp(0, 1)

    def index_of(turns: float) -> float:
        return head_dim * math.log(rope.original_positions / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    first, last = index_of(rope.fast), index_of(rope.slow)
    if rope.whole_indices:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return 1 - ((torch.arange(len(plain), dtype=torch.float32) - first) / width).clamp(0, 1)
