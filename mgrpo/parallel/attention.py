"""Attention, RoPE and norm for packs of documents, plugged into Megatron's layer spec.

A pack is `thd`: documents end to end, hidden states `[tokens, 1, hidden]`. On CPU all documents of a pack go through one
padded call of scaled_dot_product_attention (a loop over documents made a training step 2.6 times slower); on CUDA
through torch's variable-length flash attention. Documents with branches (completions that share their prompt) need a
mask, which only the padded call takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from mgrpo.parallel import backend


@dataclass
class PackedDocuments(PackedSeqParams):
    """Megatron's description of a pack, and what this attention needs beside it."""

    positions: torch.Tensor | None = None
    """`[tokens]` int64, for RoPE."""
    padded_rows: torch.Tensor | None = None
    """`[tokens]` int64: place of each token in the padded `[documents * max_seqlen]`."""
    mask: torch.Tensor | None = None
    """`[documents, 1, max_seqlen, max_seqlen]` bool when a document has branches, else None (plain causal)."""


def shares_prompts() -> bool:
    """Whether attention on this machine can handle documents with branches."""
    return not backend.has_cuda()


def describe(cu_seqlens: np.ndarray, positions: np.ndarray, branches: np.ndarray) -> PackedDocuments:
    """Describe one pack to the model.

    Args:
        cu_seqlens: `[documents + 1]` int32, over the pack's tokens.
        positions: `[tokens]` position of each token in its sequence.
        branches: `[tokens]` 0 in a document's trunk, 1.. in its branches.
    """
    device = backend.device()
    lengths = np.diff(cu_seqlens)
    longest = int(lengths.max())
    num_documents, num_tokens = len(lengths), int(cu_seqlens[-1])
    cu = torch.from_numpy(cu_seqlens.astype(np.int32)).to(device)
    # RoPE is told of one document as long as the pack: PackedRotary has already looked up each token's own position.
    whole = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    document = np.repeat(np.arange(num_documents), lengths)
    padded_rows = document * longest + np.arange(num_tokens) - cu_seqlens[:-1][document]
    mask = None
    if branches.any():
        if not shares_prompts():
            raise ValueError(
                "documents with shared prompts need the padded attention of the CPU; use shared_prompt_packing=off on CUDA"
            )
        mask = torch.from_numpy(_branch_mask(padded_rows, branches, num_documents, longest)).to(device)
    return PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=torch.from_numpy(positions.astype(np.int64)).to(device),
        padded_rows=torch.from_numpy(padded_rows.astype(np.int64)).to(device),
        mask=mask,
    )


def _branch_mask(padded_rows: np.ndarray, branches: np.ndarray, num_documents: int, longest: int) -> np.ndarray:
    """`[documents, 1, longest, longest]`: earlier tokens of the trunk or of the own branch; padding sees itself only."""
    padded = np.full(num_documents * longest, -1, dtype=np.int32)
    padded[padded_rows] = branches
    padded = padded.reshape(num_documents, longest)
    same_branch = padded[:, :, None] == padded[:, None, :]
    in_trunk = padded[:, None, :] == 0
    causal = np.tri(longest, dtype=bool)
    return ((same_branch | in_trunk) & causal | np.eye(longest, dtype=bool))[:, None]


class PackedAttention(MegatronModule):
    """Core attention over a pack: a token sees the earlier tokens of its own document (and branch)."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *,
        packed_seq_params: PackedDocuments,
        **kwargs: Any,
    ) -> torch.Tensor:
        """query `[tokens, heads/tp, dim]`, key and value `[tokens, kv_heads/tp, dim]` -> `[tokens, heads/tp * dim]`."""
        attend = self._flash if query.is_cuda else self._padded
        return attend(query, key, value, packed_seq_params).flatten(1)

    def _padded(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackedDocuments
    ) -> torch.Tensor:
        num_documents, longest = len(pack.cu_seqlens_q) - 1, pack.max_seqlen_q

        def padded(x: torch.Tensor) -> torch.Tensor:
            flat = x.new_zeros(num_documents * longest, *x.shape[1:]).index_copy(0, pack.padded_rows, x)
            return flat.unflatten(0, (num_documents, longest)).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            padded(query),
            padded(key),
            padded(value),
            attn_mask=pack.mask,
            is_causal=pack.mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, pack.padded_rows)

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackedDocuments
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            query,
            key,
            value,
            pack.cu_seqlens_q,
            pack.cu_seqlens_kv,
            pack.max_seqlen_q,
            pack.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )


class PackedRotary(RotaryEmbedding):
    """RoPE by each token's own position, for documents whose branches restart after the prompt."""

    def get_rotary_seq_len(self, *args: Any) -> torch.Tensor:
        """Positions of the pack, in place of a length: Megatron hands the answer straight to `forward`."""
        pack = args[-1]
        return pack.positions

    def forward(self, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """positions `[tokens]` -> angles `[tokens, 1, 1, dim]`."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv:1910.07467); Megatron's local one refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums gradients over tensor ranks only for parameters that carry this mark.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` -> same."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
