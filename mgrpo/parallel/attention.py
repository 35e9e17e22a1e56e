"""Attention, RoPE and norm for packs of documents, plugged into Megatron's layer spec.

A pack is `thd`: documents end to end, hidden states `[tokens, 1, hidden]`. On CPU all documents of a pack go through one
padded call of scaled_dot_product_attention (a loop over documents made a training step 2.6 times slower); on CUDA
through torch's variable-length flash attention. Documents with branches (completions that share their prompt) need a
mask: a dense one in the padded call, a block mask and FlexAttention on CUDA.
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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

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
    block_mask: BlockMask | None = None
    """On CUDA in place of `mask`, over the tokens of the pack."""


def shared_prompts_pay() -> bool:
    """Whether documents with branches are known to be cheaper on this machine: on CUDA nobody has measured it."""
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
    mask = block_mask = None
    if branches.any() and device.type == "cuda":
        block_mask = branch_block_mask(document, branches, device)
    elif branches.any():
        mask = torch.from_numpy(_branch_mask(padded_rows, branches, num_documents, longest))
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
        block_mask=block_mask,
    )


def branch_block_mask(document: np.ndarray, branches: np.ndarray, device: torch.device) -> BlockMask:
    """What `_branch_mask` says, for FlexAttention: `document` and `branches` are `[tokens]`."""
    documents = torch.from_numpy(document.astype(np.int32)).to(device)
    places = torch.from_numpy(branches.astype(np.int32)).to(device)

    def sees(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        is_ancestor = (places[column] == 0) | (places[column] == places[row])
        return (column <= row) & (documents[column] == documents[row]) & is_ancestor

    return create_block_mask(sees, None, None, len(document), len(document), device=device)


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
        if packed_seq_params.block_mask is not None:
            attend = self._flex
        else:
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

    def _flex(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackedDocuments) -> torch.Tensor:
        # Uncompiled it computes the same with all scores in memory, which is what a test on the CPU does.
        attend = torch.compile(flex_attention, dynamic=True) if query.is_cuda else flex_attention
        out = attend(
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            block_mask=pack.block_mask,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


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
