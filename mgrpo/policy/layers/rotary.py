"""Rotary position embeddings: frequencies, turns by each token's own position, and the attention that uses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import SelfAttention

from mgrpo.models.rope import Rope
from mgrpo.parallel import backend
from mgrpo.policy.layers.norms import HeadsNorm, LayerConfig


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """`[share of head_dim / 2]` float32: the angle in radians by which each rotated pair of dimensions turns per position."""
    rotated = int(head_dim * rope.share)
    plain = 1.0 / rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if rope.scaling == "default":
        return plain
    kept = _kept_share(rope, plain, rotated)
    return plain * (kept + (1 - kept) / rope.factor)


def _kept_share(rope: Rope, plain: torch.Tensor, rotated: int) -> torch.Tensor:
    """`[rotated / 2]`: 1 where a frequency is kept, 0 where it is divided by the factor, and a blend in between."""
    if rope.scaling == "linear":
        return torch.zeros_like(plain)
    if rope.scaling == "llama3":
        turns = rope.original_positions * plain / (2 * math.pi)
        return ((turns - rope.slow) / (rope.fast - rope.slow)).clamp(0, 1)

    def index_of(turns: float) -> float:
        return rotated * math.log(rope.original_positions / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    first, last = index_of(rope.fast), index_of(rope.slow)
    if rope.whole_indices:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first or 0.001
    return 1 - ((torch.arange(len(plain), dtype=torch.float32) - first) / width).clamp(0, 1)


class PackedRotary(torch.nn.Module):
    """Cosines and sines of each token's position: documents have branches whose positions restart after the prompt.

    Args:
        frequencies: `[kinds, rotated / 2]` float32, on the device of the positions: the layers of a model may differ, see `RotaryAttention`.
        factors: for each kind the factor of its cosines and sines.
        dtype: of queries and keys.
    """

    def __init__(self, frequencies: torch.Tensor, factors: Sequence[float], dtype: torch.dtype) -> None:
        super().__init__()
        # Not buffers, so that they stay float32 when the model is cast.
        self.frequencies = frequencies
        self.factors = None if all(factor == 1 for factor in factors) else frequencies.new_tensor(factors)
        self.dtype = dtype

    def get_rotary_seq_len(self, *args: Any) -> torch.Tensor:
        """Positions of the pack, in place of a length: Megatron passes the result straight to `forward`."""
        pack = args[-1]
        return pack.positions

    def forward(self, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """positions `[local tokens]` -> cosines and sines `[kinds, 2, tokens, 1, 1, rotated / 2]`."""
        angles = self.frequencies[:, None] * positions.to(self.frequencies.dtype)[:, None]
        turns = torch.stack((angles.cos(), angles.sin()), dim=1)
        if self.factors is not None:
            turns = turns * self.factors[:, None, None, None]
        return turns.to(self.dtype)[:, :, :, None, None]


class RotaryAttention(SelfAttention):
    """Megatron's self-attention, with queries and keys turned by the kind of angles that its layer uses.

    Megatron's own rotation computes sines and cosines in every layer and reads the lengths of documents from the device.
    """

    def __init__(
        self, *args: Any, config: LayerConfig, rope: int, has_whole_norms: bool, has_out_bias: bool, **kwargs: Any
    ) -> None:
        # Megatron has one setting for all linear layers, which the MLP's keep.
        config.add_bias_linear, of_others = has_out_bias, config.add_bias_linear
        super().__init__(*args, config=config, **kwargs)
        config.add_bias_linear = of_others
        self.rope, self.turn = rope, _turn(self.config)
        if has_whole_norms:
            # In the spec, megatron-core 0.19 also needs `qk_layernorm`, which sums their gradients over tensor ranks.
            config, size = self.config, self.hidden_size_per_attention_head
            self.q_layernorm = HeadsNorm(config, config.num_attention_heads, size, config.layernorm_epsilon)
            self.k_layernorm = HeadsNorm(config, config.num_query_groups, size, config.layernorm_epsilon)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *, rotary_pos_emb: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Forward pass of Megatron's attention; `rotary_pos_emb` is the output of `PackedRotary`."""
        self._turns = rotary_pos_emb[self.rope]
        return super().forward(hidden_states, attention_mask, **kwargs)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Query `[tokens, 1, heads/tp, head_dim]` and key `[tokens, 1, kv_heads/tp, head_dim]`, turned, value, and a gate if any."""
        query, key, value, *gate = super().get_query_key_value_tensors(*args, **kwargs)
        if gate and gate[0].shape[2] > query.shape[2]:
            # Where several ranks have a copy of a key-value head, Megatron leaves them the gates of all its heads.
            shares = gate[0].split(query.shape[2], dim=2)
            gate = [shares[parallel_state.get_tensor_model_parallel_rank() % len(shares)]]
        query, key = self.turn(query, key, *self._turns)
        return query, key, value, *gate


def _turn(config: LayerConfig) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    if config.uses_liger:
        from mgrpo.policy.layers import liger

        return liger.turned
    return backend.compiled(turned)


def turned(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key, of whose first `rotated` dimensions each pair `i` and `i + rotated / 2` is turned by its token's angle."""
    rotated = 2 * cosines.shape[-1]

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second, rest = x.split((rotated // 2, rotated // 2, x.shape[-1] - rotated), dim=-1)
        return torch.cat((*_turned_pairs(first, second, cosines, sines), rest), dim=-1)

    return turn(query), turn(key)


def turned_neighbours(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x `[..., 2n]`, of which each pair `2i` and `2i + 1` is turned by its token's angle; cosines and sines `[..., n]`.

    The result has them at `i` and `i + n`: the product of a query and a key does not depend on the order.
    """
    return torch.cat(_turned_pairs(x[..., 0::2], x[..., 1::2], cosines, sines), dim=-1)


def _turned_pairs(
    first: torch.Tensor, second: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return first * cosines - second * sines, second * cosines + first * sines
