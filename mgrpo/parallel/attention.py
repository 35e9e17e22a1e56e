"""Core attention over packs of documents, plugged into Megatron's layer spec.

On CPU all documents of a pack go through one padded call of scaled_dot_product_attention (a loop over documents made a
training step 2.6 times slower); on CUDA through torch's variable-length flash attention. Documents with branches
(completions that share their prompt) need a mask: a dense one in the padded call, a block mask and FlexAttention on CUDA.
FlexAttention also caps scores on CUDA, for models that ask for it; on CPU capped scores are computed explicitly.

With context parallelism the subclasses in `context` are used.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.flex_attention import flex_attention

from mgrpo.parallel import backend
from mgrpo.parallel.packs import PackedDocuments, Queries


def shared_prompts_pay() -> bool:
    """Whether documents with branches are known to be cheaper on this machine; not yet measured on CUDA."""
    return not backend.has_cuda()


class PackedAttention(MegatronModule):
    """Core attention over a pack: a token sees the earlier tokens of its own document (and branch)."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = scale or 1 / math.sqrt(config.kv_channels)
        self.window, self.softcap = window, softcap

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedDocuments,
        **kwargs: Any,
    ) -> torch.Tensor:
        """query `[local, heads/tp, dim]`, key and value `[local, kv_heads/tp, dim]` -> `[local, heads/tp * dim]`.

        All context-parallel ranks must call, each with its local tokens.
        """
        pack = packed_seq_params
        if pack.gathered_rows is None:
            return self.attend(query, key, value, pack, pack.all_queries).flatten(1)
        return self.attend_over_context(query, key, value, pack, pack.gathered_rows).flatten(1)

    def attend_over_context(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pack: PackedDocuments,
        gathered_rows: torch.Tensor,
    ) -> torch.Tensor:
        """As `forward`, where other ranks hold the other tokens; -> `[local, heads, dim]`. See `context`."""
        raise NotImplementedError

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackedDocuments, queries: Queries
    ) -> torch.Tensor:
        """As `forward`, for those `queries` over all keys; -> `[queries, heads, dim]`."""
        if not query.is_cuda:
            return self._padded(query, key, value, pack, queries)
        if queries.has_branches or self.softcap is not None:
            return self._flex(query, key, value, queries)
        return self._flash(query, key, value, pack, queries)

    def _padded(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackedDocuments, queries: Queries
    ) -> torch.Tensor:
        num_documents = len(pack.cu_seqlens_q) - 1

        def padded(x: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
            flat = x.new_zeros(num_documents * length, *x.shape[1:]).index_copy(0, rows, x)
            return flat.unflatten(0, (num_documents, length)).transpose(1, 2)

        out = self._attend_padded(
            padded(query, queries.rows, queries.longest),
            padded(key, pack.all_queries.rows, pack.max_seqlen_kv),
            padded(value, pack.all_queries.rows, pack.max_seqlen_kv),
            queries.mask(self.window),
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, queries.rows)

    def _attend_padded(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`[documents, heads, longest, dim]`; without a mask plain causal attention."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        if mask is None:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        copies = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
        scores = self._capped(query @ key.transpose(2, 3) * self.scale).masked_fill(~mask, -math.inf)
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value

    def _capped(self, scores: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackedDocuments, queries: Queries
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        lengths = (pack.cu_seqlens_q, pack.cu_seqlens_kv, pack.max_seqlen_q, pack.max_seqlen_kv)
        if not queries.are_all:
            lengths = pack.stretches[1:]
            key, value = key.index_select(0, pack.stretches.keys), value.index_select(0, pack.stretches.keys)
        out = varlen_attn(
            query,
            key,
            value,
            *lengths,
            scale=self.scale,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(out, torch.Tensor)  # A tuple only where auxiliary outputs are asked for.
        return out

    def _flex(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: Queries) -> torch.Tensor:
        # Uncompiled it computes the same with all scores in memory, which is what a test on the CPU does.
        attend = torch.compile(flex_attention, dynamic=True) if query.is_cuda else flex_attention
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = attend(
            query,
            key,
            value,
            block_mask=queries.block_mask(self.window, query.device),
            score_mod=None if self.softcap is None else self._capped,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)
