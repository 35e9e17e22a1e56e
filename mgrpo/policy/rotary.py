"""Rotary position embeddings: frequencies, angles by each token's own position, and the attention that uses them."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import SelfAttention

from mgrpo.models.rope import Rope


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """`[head_dim / 2]` float32: the angle in radians by which each pair of dimensions turns per position."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling == "default":
        return plain
    kept = _kept_share(rope, plain, head_dim)
    return plain * (kept + (1 - kept) / rope.factor)


def _kept_share(rope: Rope, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[head_dim / 2]`: 1 where a frequency is kept, 0 where it is divided by the factor, and a blend in between."""
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


class PackedRotary(torch.nn.Module):
    """RoPE by each token's own position, for documents whose branches restart after the prompt.

    Args:
        frequencies: `[kinds, head_dim / 2]` float32: the layers of a model may differ, see `RotaryAttention`.
    """

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies  # Not a buffer, so that it stays float32 when the model is cast.

    def get_rotary_seq_len(self, *args: Any) -> torch.Tensor:
        """Positions of the pack, in place of a length: Megatron passes the result straight to `forward`."""
        pack = args[-1]
        return pack.positions

    def forward(self, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """positions `[local tokens]` -> angles `[kinds, tokens, 1, 1, dim]`, 0 for tokens of other context ranks."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = self.frequencies[:, None] * positions.to(self.frequencies.dtype)[:, None]
        angles = torch.cat((angles, angles), dim=-1)[:, :, None, None]
        size = parallel_state.get_context_parallel_world_size()
        if size == 1:
            return angles
        # Megatron takes stretches `rank` and `2 x size - 1 - rank` of what it believes is one long document.
        rank, half = parallel_state.get_context_parallel_rank(), len(positions) // 2
        table = angles.new_zeros(len(angles), size * len(positions), *angles.shape[2:])
        table[:, rank * half : (rank + 1) * half] = angles[:, :half]
        late = 2 * size - 1 - rank
        table[:, late * half : (late + 1) * half] = angles[:, half:]
        return table


class RotaryAttention(SelfAttention):
    """Megatron's self-attention with the kind of angles, among those of `PackedRotary`, that its layer uses."""

    def __init__(self, *args: Any, rope: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rope = rope

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *, rotary_pos_emb: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """As Megatron's; `rotary_pos_emb` is `[kinds, tokens, 1, 1, dim]`."""
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb[self.rope], **kwargs)
