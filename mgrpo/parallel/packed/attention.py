"""Core attention over packs of documents, plugged into Megatron's layer spec.

On CUDA all documents of a pack go through torch's variable-length flash attention. On CPU, and on CUDA for inputs that flash
attention refuses (float32 for one), they go through one padded call of scaled_dot_product_attention (a loop over
documents made a training step on CPU 2.6 times slower).

Documents with branches (completions that share their prompt) need a mask: a block mask and FlexAttention where there is
flash attention, a dense mask in the padded call. FlexAttention also caps scores, for models that do so; the padded
path computes capped scores explicitly.

With context parallelism the subclasses in `context` are used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from mgrpo.parallel import backend
from mgrpo.parallel.packed import varlen
from mgrpo.parallel.packed.attention_sinks import flash_with_sinks, kept_share, with_sink_key
from mgrpo.parallel.packed.packs import PackedDocuments, Queries


def attention_remarks(dtype: torch.dtype, head_dim: int) -> list[str]:
    """Remarks on the kernel of attention over such heads, where a user has a choice: on CUDA."""
    if not backend.has_cuda():
        return []
    flash = backend.flash_attention(dtype, head_dim)
    if flash is not None:
        return [f"attention: FlashAttention {flash.removeprefix('FA')}"]
    kind = str(dtype).removeprefix("torch.")
    return [
        f"attention: one padded call for all documents of a pack, slower and with more memory; flash attention takes "
        f"bfloat16 or float16, a head_dim that divides by 8 up to 256, and GPUs from Ampere on, not {kind} with head_dim={head_dim} here"
    ]


@functools.cache
def cap_scores(softcap: float) -> Callable[..., torch.Tensor]:
    """`softcap * tanh(scores / softcap)`; the same function for all layers, because FlexAttention is compiled for each."""

    @torch.compiler.assume_constant_result
    def bound() -> (
        float
    ):  # As a variable number of the compiled kernel, which a captured float becomes, it cannot be lowered.
        return softcap

    def capped(scores: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        return bound() * torch.tanh(scores / bound())

    return capped


class PackedAttention(MegatronModule):
    """Core attention over a pack: a token attends to the earlier tokens of its own document (and branch)."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: int = 0,
        **kwargs: Any,
    ) -> None:
        """`sinks` are the heads of this rank, where they have sinks."""
        super().__init__(config=config)
        self.scale = scale or 1 / math.sqrt(config.kv_channels)
        self.window, self.cap = window, None if softcap is None else cap_scores(softcap)
        self.sinks: torch.nn.Parameter | None = None
        if sinks:
            assert softcap is None
            self.sinks = torch.nn.Parameter(torch.zeros(sinks, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)

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
        """query `[local, heads/tp, dim]`, key `[local, kv_heads/tp, dim]`, value `[local, kv_heads/tp, v_dim]` -> `[local, heads/tp * v_dim]`.

        All context-parallel ranks must call, each with its local tokens.
        """
        pack = packed_seq_params
        if pack.gathered_rows is None:
            return self.attend(query, key, value, pack, pack.all_queries, self.sinks).flatten(1)
        return self.attend_over_context(query, key, value, pack, pack.gathered_rows).flatten(1)

    def attend_over_context(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pack: PackedDocuments,
        gathered_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Attention as `forward`, where other ranks hold the other tokens; -> `[local, heads, v_dim]`. See `context`."""
        raise NotImplementedError

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pack: PackedDocuments,
        queries: Queries,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention as `forward`, for those `queries` over all keys and the heads' `sinks [heads]`; -> `[queries, heads, v_dim]`."""
        if not backend.flash_attention(query.dtype, query.shape[-1]):
            return self._padded(query, key, value, pack, queries, sinks)
        if queries.has_branches or self.cap is not None:
            return self._flex(query, key, value, queries, sinks)
        if not varlen.can_attend(with_lse=sinks is not None):
            return self._padded(query, key, value, pack, queries, sinks)
        return self._flash(query, key, value, pack, queries, sinks)

    def _padded(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pack: PackedDocuments,
        queries: Queries,
        sinks: torch.Tensor | None = None,
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
            sinks,
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, queries.rows)

    def _attend_padded(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`[documents, heads, longest, dim]`; without a mask plain causal attention."""
        copies, dim = query.shape[1] // key.shape[1], value.shape[-1]
        if query.is_cuda or self.cap is not None:
            # In float32 CUDA's kernel that does not keep all scores takes as many key heads as heads.
            key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
            copies = 1
        if sinks is not None:
            query, key, value, mask = with_sink_key(query, key, value, mask, sinks, self.scale)
        if self.cap is None:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=copies > 1
            )
            return out[..., :dim]
        if mask is None:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        scores = self.cap(query @ key.transpose(2, 3) * self.scale).masked_fill(~mask, -math.inf)
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value

    def _flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pack: PackedDocuments,
        queries: Queries,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        lengths: Sequence[Any] = (pack.cu_seqlens_q, pack.cu_seqlens_kv, pack.max_seqlen_q, pack.max_seqlen_kv)
        if not queries.are_all:
            assert pack.stretches is not None
            rows, *lengths = pack.stretches
            key, value = key.index_select(0, rows), value.index_select(0, rows)
        if sinks is not None:
            return flash_with_sinks(query, key, value, sinks, lengths, scale=self.scale, window=self.window)
        v_dim = value.shape[-1]
        if v_dim != key.shape[-1]:  # Its kernels take one size for all.
            value = F.pad(value, (0, key.shape[-1] - v_dim))
        out = varlen.attend(query, key, value, lengths, scale=self.scale, window=self.window)
        return out[..., :v_dim]

    def _flex(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: Queries,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Uncompiled it computes the same with all scores in memory, which is what a test on the CPU does.
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        result = backend.compiled(flex_attention)(
            query,
            key,
            value,
            block_mask=queries.block_mask(self.window),
            score_mod=self.cap,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        if sinks is None:
            return result[0].transpose(0, 1)
        out, lse = result[0], result[1].lse
        return (out * kept_share(lse, sinks)[..., None]).to(out.dtype)[0].transpose(0, 1)
