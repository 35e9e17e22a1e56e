"""Attention and RoPE for packs of documents, plugged into Megatron's layer spec.

A pack is `thd`: documents end to end, hidden states `[tokens, 1, hidden]`. On CPU all documents of a pack go through one
padded call of scaled_dot_product_attention (a loop over documents made a training step 2.6 times slower); on CUDA
through torch's variable-length flash attention. Documents with branches (completions that share their prompt) need a
mask: a dense one in the padded call, a block mask and FlexAttention on CUDA. FlexAttention also caps scores on CUDA, where a
model asks for it; on CPU they are computed one by one then.

Context-parallel ranks share every document, see `context`: `describe` says which tokens are whose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mgrpo.parallel import backend


class Queries:
    """Some of a pack's tokens as queries over all of it, in the padded form `[documents, longest]`.

    Args:
        tokens: `[queries]` which tokens, document after document.
        cu_seqlens: `[documents + 1]` over the pack's tokens.
        positions, branches: `[tokens]`, as in `describe`.
    """

    def __init__(
        self, tokens: np.ndarray, cu_seqlens: np.ndarray, positions: np.ndarray, branches: np.ndarray, *, are_all: bool
    ) -> None:
        self.tokens, self.cu_seqlens, self.positions, self.branches = tokens, cu_seqlens, positions, branches
        self.are_all = are_all
        lengths = np.diff(cu_seqlens)
        documents = np.repeat(np.arange(len(lengths)), lengths)[tokens]
        counts = np.bincount(documents, minlength=len(lengths))
        self.longest = int(counts.max())
        starts = np.cumsum(counts) - counts
        self.rows = torch.from_numpy(documents * self.longest + np.arange(len(tokens)) - starts[documents])
        self.rows = self.rows.to(backend.device())
        """`[queries]` int64: place of each query in the padded `[documents * longest]`."""
        # The only branch of a document sees all of it: plain causal attention.
        self.has_branches = bool(branches.max() > 1)
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> torch.Tensor | None:
        """`[documents, 1, longest, longest key]` bool: who sees whom; None where plain causal attention says it all.

        A token sees the earlier tokens of its own branch and of the trunk, at most `window` positions back, itself included.
        """
        if window not in self._masks:
            is_short = window is None or window >= int(np.diff(self.cu_seqlens).max())
            is_plain = self.are_all and is_short and not self.has_branches
            dense = None if is_plain else torch.from_numpy(self._dense_mask(window))
            self._masks[window] = dense if dense is None else dense.to(backend.device())
        return self._masks[window]

    def block_mask(self, window: int | None, device: torch.device) -> BlockMask:
        """What `mask` says, for FlexAttention over `[queries, tokens]`."""
        if window not in self._block_masks:
            documents = np.repeat(np.arange(len(self.cu_seqlens) - 1), np.diff(self.cu_seqlens))
            tokens, document, position, branch = (
                torch.from_numpy(array.astype(np.int32)).to(device)
                for array in (self.tokens, documents, self.positions, self.branches)
            )

            def sees(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                query = tokens[row]
                is_ancestor = (branch[key] == 0) | (branch[key] == branch[query])
                is_near = True if window is None else position[query] - position[key] < window
                return (key <= query) & (document[key] == document[query]) & is_ancestor & is_near

            sizes = (len(self.tokens), len(documents))
            self._block_masks[window] = create_block_mask(sees, None, None, *sizes, device=device)
        return self._block_masks[window]

    def _dense_mask(self, window: int | None) -> np.ndarray:
        starts, lengths = self.cu_seqlens[:-1, None], np.diff(self.cu_seqlens)[:, None]
        # Columns behind a document's end repeat its last token; no query comes after that one.
        keys = starts + np.minimum(np.arange(lengths.max()), lengths - 1)
        queries = np.full(len(lengths) * self.longest, -1)
        queries[self.rows.cpu().numpy()] = self.tokens
        queries = queries.reshape(len(lengths), self.longest)
        visible = starts[:, :, None] + np.arange(lengths.max()) <= queries[:, :, None]
        branches = self.branches[keys][:, None, :]
        visible &= (branches == self.branches[queries][:, :, None]) | (branches == 0)
        if window is not None:
            visible &= self.positions[queries][:, :, None] - self.positions[keys][:, None, :] < window
        # Padding sees something, or its softmax would be 0 / 0.
        visible[queries < 0] = np.arange(lengths.max()) == 0
        return visible[:, None]


@dataclass
class PackedDocuments(PackedSeqParams):
    """Megatron's description of a pack, and what this attention needs beside it."""

    positions: torch.Tensor | None = None
    """`[own]` int64, for RoPE: of the tokens that this context-parallel rank holds, which is all of them without others."""
    own: torch.Tensor | None = None
    """`[own]` int64: which tokens of the pack these are; None: all."""
    gathered: torch.Tensor | None = None
    """`[tokens]` int64: where each token lies when the ranks' parts are laid end to end; None with `own`."""
    whole: Queries | None = None
    """All tokens as queries."""
    share: Queries | None = None
    """The own tokens as queries."""

    @cached_property
    def stretches(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """For variable-length attention of the own tokens: keys' tokens, both cumulative lengths, both longest ones.

        Each document is two sequences here, its early and its late stretch, with all keys up to the stretch's end.
        """
        own, device = self.share.tokens, self.cu_seqlens_q.device
        widths = np.repeat(np.diff(self.share.cu_seqlens) * len(own) // self.share.cu_seqlens[-1] // 2, 2)
        ends = own[np.cumsum(widths) - 1] + 1
        begins = np.repeat(self.share.cu_seqlens[:-1], 2)
        keys = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])

        def cumulative(lengths: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(device)

        counts = ends - begins
        return (
            torch.from_numpy(keys).to(device),
            cumulative(widths),
            cumulative(counts),
            int(widths.max()),
            int(counts.max()),
        )


def shared_prompts_pay() -> bool:
    """Whether documents with branches are known to be cheaper on this machine: on CUDA nobody has measured it."""
    return not backend.has_cuda()


def own_tokens(cu_seqlens: np.ndarray, rank: int, size: int) -> np.ndarray:
    """`[tokens / size]` int64: the tokens of a pack that context-parallel rank `rank` of `size` holds.

    Of each document, whose length divides by 2 x size, an early and a late stretch (numbers `rank` and
    `2 x size - 1 - rank`), so that causal attention is the same work everywhere; Megatron's RoPE expects this order.
    """
    stretches = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        width = (stop - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            stretches.append(np.arange(start + number * width, start + (number + 1) * width))
    return np.concatenate(stretches)


def describe(
    cu_seqlens: np.ndarray, positions: np.ndarray, branches: np.ndarray, *, rank: int = 0, size: int = 1
) -> PackedDocuments:
    """Describe one pack to the model.

    Args:
        cu_seqlens: `[documents + 1]` int32, over the pack's tokens.
        positions: `[tokens]` position of each token in its sequence.
        branches: `[tokens]` 0 in a document's trunk, 1.. in its branches.
        rank, size: this rank's place among the context-parallel ranks.
    """
    device = backend.device()

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    lengths = np.diff(cu_seqlens)
    longest, num_tokens = int(lengths.max()), int(cu_seqlens[-1])
    cu = torch.from_numpy(cu_seqlens.astype(np.int32)).to(device)
    # RoPE is told of one document as long as the pack: PackedRotary has already looked up each token's own position.
    one = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    places = (cu_seqlens, positions, branches)
    whole = share = Queries(np.arange(num_tokens), *places, are_all=True)
    own = gathered = None
    if size > 1:
        order = [own_tokens(cu_seqlens, other, size) for other in range(size)]
        share = Queries(order[rank], *places, are_all=False)
        own, gathered = to_device(order[rank]), to_device(np.argsort(np.concatenate(order)))
    return PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=one,
        cu_seqlens_kv_padded=one,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=to_device(positions[share.tokens]),
        own=own,
        gathered=gathered,
        whole=whole,
        share=share,
    )


class PackedAttention(MegatronModule):
    """Core attention over a pack: a token sees the earlier tokens of its own document (and branch)."""

    def __init__(
        self,
        config: Any,
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
        attention_mask: Any = None,
        *,
        packed_seq_params: PackedDocuments,
        **kwargs: Any,
    ) -> torch.Tensor:
        """query `[own, heads/tp, dim]`, key and value `[own, kv_heads/tp, dim]` -> `[own, heads/tp * dim]`.

        All context-parallel ranks must call, each with the tokens that it holds.
        """
        pack = packed_seq_params
        if pack.own is None:
            return self.attend(query, key, value, pack, pack.whole).flatten(1)
        return self.attend_over_context(query, key, value, pack).flatten(1)

    def attend_over_context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackedDocuments
    ) -> torch.Tensor:
        """As `forward`, where other ranks hold tokens, too; -> `[own, heads, dim]`. See `context`."""
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
            padded(key, pack.whole.rows, pack.max_seqlen_kv),
            padded(value, pack.whole.rows, pack.max_seqlen_kv),
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

    def _capped(self, scores: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackedDocuments, queries: Queries
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if queries.are_all:
            lengths = (pack.cu_seqlens_q, pack.cu_seqlens_kv, pack.max_seqlen_q, pack.max_seqlen_kv)
        else:
            keys, *lengths = pack.stretches
            key, value = key.index_select(0, keys), value.index_select(0, keys)
        return varlen_attn(
            query,
            key,
            value,
            *lengths,
            scale=self.scale,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _flex(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: Queries) -> torch.Tensor:
        # Uncompiled it computes the same with all scores in memory, which is what a test on the CPU does.
        attend = torch.compile(flex_attention, dynamic=True) if query.is_cuda else flex_attention
        out = attend(
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            block_mask=queries.block_mask(self.window, query.device),
            score_mod=None if self.softcap is None else self._capped,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


class PackedRotary(torch.nn.Module):
    """RoPE by each token's own position, for documents whose branches restart after the prompt.

    Args:
        frequencies: `[kinds, head_dim / 2]` float32: layers of a model may differ, see `RotaryAttention`.
    """

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies  # no buffer: it stays float32 where the model is cast

    def get_rotary_seq_len(self, *args: Any) -> torch.Tensor:
        """Positions of the pack, in place of a length: Megatron hands the answer straight to `forward`."""
        pack = args[-1]
        return pack.positions

    def forward(self, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """positions `[own]` -> angles `[kinds, tokens, 1, 1, dim]`; of other context-parallel ranks' tokens they are 0."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = self.frequencies[:, None] * positions.to(self.frequencies.dtype)[:, None]
        angles = torch.cat((angles, angles), dim=-1)[:, :, None, None]
        size = parallel_state.get_context_parallel_world_size()
        if size == 1:
            return angles
        # Megatron takes stretches number `rank` and `2 x size - 1 - rank` of what it believes is one long document.
        rank, half = parallel_state.get_context_parallel_rank(), len(positions) // 2
        table = angles.new_zeros(len(angles), size * len(positions), *angles.shape[2:])
        table[:, rank * half : (rank + 1) * half] = angles[:, :half]
        late = 2 * size - 1 - rank
        table[:, late * half : (late + 1) * half] = angles[:, half:]
        return table


class RotaryAttention(SelfAttention):
    """Megatron's self-attention, which takes its own of the kinds of angles that `PackedRotary` gives."""

    def __init__(self, *args: Any, rope: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rope = rope

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *, rotary_pos_emb: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """As Megatron's; `rotary_pos_emb` is `[kinds, tokens, 1, 1, dim]`."""
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb[self.rope], **kwargs)
