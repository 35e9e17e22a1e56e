"""A pack as input of attention: its documents, its mask, and the tokens that this rank holds.

A pack is `thd`: documents end to end, hidden states `[tokens, 1, hidden]`. Context-parallel ranks share every document;
`local_tokens` are those that a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.attention.flex_attention import BlockMask

from mgrpo.parallel import backend
from mgrpo.parallel.packed.delta_rule import Chunks


class Queries:
    """Some of a pack's tokens as queries over all of it, in the padded form `[documents, longest]`.

    Masks are made on the device from the copies of `__init__`: a forward pass, which uses them, copies nothing.

    Args:
        tokens: `[queries]` indices in the pack, document after document.
        cu_seqlens: `[documents + 1]` over the pack's tokens.
        positions, branches: `[tokens]`, as in `describe`.
        are_all: these are all tokens of the pack.
    """

    def __init__(
        self, tokens: np.ndarray, cu_seqlens: np.ndarray, positions: np.ndarray, branches: np.ndarray, *, are_all: bool
    ) -> None:
        self.tokens, self.cu_seqlens, self.are_all = tokens, cu_seqlens, are_all
        lengths = np.diff(cu_seqlens)
        documents_of_keys = np.repeat(np.arange(len(lengths)), lengths)
        documents = documents_of_keys[tokens]
        counts = np.bincount(documents, minlength=len(lengths))
        self.longest, self._longest_key = int(counts.max()), int(lengths.max())
        starts = np.cumsum(counts) - counts
        rows = documents * self.longest + np.arange(len(tokens)) - starts[documents]
        self.rows = backend.to_device(rows, np.int64)
        """`[queries]` int64: row of each query in the padded `[documents * longest]`."""
        # The only branch of a document attends to all of it: plain causal attention.
        self.has_branches = bool(branches.max() > 1)
        self._queries = backend.to_device(tokens, np.int64)
        self._begins, self._lengths = backend.to_device(np.stack((cu_seqlens[:-1], lengths)), np.int64)
        self._keys = backend.to_device(
            np.stack((np.arange(len(positions)), documents_of_keys, positions, branches)), np.int32
        )
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> torch.Tensor | None:
        """`[documents, 1, longest, longest key]` bool: the visible keys; None where plain causal attention is the same.

        A token attends to the earlier tokens of its own branch and of the trunk, at most `window` positions back, itself included.
        """
        if window not in self._masks:
            is_short = window is None or window >= self._longest_key
            is_plain = self.are_all and is_short and not self.has_branches
            self._masks[window] = None if is_plain else self._dense_mask(window)
        return self._masks[window]

    def block_mask(self, window: int | None) -> BlockMask:
        """The same visibility as `mask`, for FlexAttention over `[queries, tokens]`."""
        if window not in self._block_masks:
            queries = self._keys.index_select(1, self._queries)
            self._block_masks[window] = _block_mask(queries, self._keys, window)
        return self._block_masks[window]

    def _dense_mask(self, window: int | None) -> torch.Tensor:
        _, _, positions, branches = self._keys
        columns = torch.arange(self._longest_key, device=self.rows.device)
        # Columns past a document's end repeat its last token, which no query comes after.
        keys = self._begins[:, None] + columns.minimum(self._lengths[:, None] - 1)
        padded = self.rows.new_full((len(self._lengths) * self.longest,), -1).index_copy_(0, self.rows, self._queries)
        queries = padded.view(len(self._lengths), self.longest)
        visible = self._begins[:, None, None] + columns <= queries[:, :, None]
        branches_of_keys = branches[keys][:, None]
        visible &= (branches_of_keys == branches[queries][:, :, None]) | (branches_of_keys == 0)
        if window is not None:
            visible &= positions[queries][:, :, None] - positions[keys][:, None] < window
        # Padding attends to one key, or its softmax would be 0 / 0.
        return torch.where(queries[:, :, None] < 0, columns == 0, visible)[:, None]


BLOCK = 128
"""Queries and keys of a block: FlexAttention skips blocks without a visible pair, and masks only those that are not full."""


def _block_mask(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> BlockMask:
    """Block mask, from the smallest and largest token, document, position and branch of each block.

    torch's own `create_block_mask` first writes every pair of a query and a key. Where documents share a block, these
    bounds may keep a block that it would drop; attention then takes longer and computes the same.

    Args:
        queries, keys: `[4, queries]` and `[4, tokens]` int32: token, document, position, branch.
    """
    (first_query, first_document, first_position, first_branch), query_ends = _bounds(queries)[:, :, :, None]
    (first_key, first_of, nearest_from, lowest), key_ends = _bounds(keys)[:, :, None]
    last_query, last_document, last_position, last_branch = query_ends
    last_key, last_of, nearest_to, highest = key_ends

    is_one_document = (first_document == last_document) & (first_of == last_of) & (first_document == first_of)
    is_seen = (first_key <= last_query) & (first_of <= last_document) & (last_of >= first_document)
    is_sibling = (lowest > 0) & ((lowest > last_branch) | (highest < first_branch))
    is_ancestor = (highest == 0) | ((lowest == highest) & (first_branch == lowest) & (last_branch == lowest))
    is_full = is_one_document & (last_key <= first_query) & is_ancestor
    if window is not None:
        is_sibling |= first_position - nearest_to >= window
        is_full &= last_position - nearest_from < window
    # The last block of either side is cut off unless it happens to be whole.
    is_full[queries.shape[1] // BLOCK :] = False
    is_full[:, keys.shape[1] // BLOCK :] = False
    is_partial = is_seen & ~(is_sibling & is_one_document) & ~is_full
    return BlockMask.from_kv_blocks(
        *_numbers(is_partial),
        *_numbers(is_full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_visibility(queries, keys, window),
        seq_lengths=(queries.shape[1], keys.shape[1]),
    )


def _bounds(values: torch.Tensor) -> torch.Tensor:
    """`[4, n]` -> `[2, 4, blocks]`: smallest and largest of each block."""
    count = values.shape[1]
    rows = torch.arange(-(-count // BLOCK) * BLOCK, device=values.device).clamp(max=count - 1)
    blocks = values.index_select(1, rows).unflatten(1, (-1, BLOCK))
    return torch.stack((blocks.amin(2), blocks.amax(2)))


def _numbers(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[query blocks, key blocks]` bool -> the number of true entries of each query block, and key blocks in order, true ones first."""
    order = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def _visibility(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> Callable[..., torch.Tensor]:
    token, document, position, branch = queries
    _, document_of, position_of, branch_of = keys

    def sees(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_ancestor = (branch_of[key] == 0) | (branch_of[key] == branch[row])
        visible = (key <= token[row]) & (document_of[key] == document[row]) & is_ancestor
        return visible if window is None else visible & (position[row] - position_of[key] < window)

    return sees


class Stretches(NamedTuple):
    """Arguments of variable-length attention of a rank's tokens: each document is two sequences, early and late stretch."""

    keys: torch.Tensor
    """Tokens that are keys, sequence after sequence: all of the document up to the stretch's end."""
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    max_seqlen_q: int
    max_seqlen_kv: int


@dataclass(kw_only=True)
class PackedDocuments(PackedSeqParams):
    """Megatron's description of a pack, with the further inputs of this attention."""

    all_queries: Queries
    """All tokens as queries."""
    local_queries: Queries
    """This rank's tokens as queries; the same object as `all_queries` without context parallelism."""
    positions: torch.Tensor
    """`[local tokens]` int64, for RoPE."""
    branches: np.ndarray
    """`[tokens]` of all ranks, on the host; see `describe`."""
    gathered_rows: torch.Tensor | None = None
    """`[tokens]` int64: row of each token when all ranks' tokens are concatenated; None without context parallelism."""
    stretches: Stretches | None = None
    """The local tokens for variable-length attention; None without context parallelism."""

    @cached_property
    def chunks(self) -> Chunks:
        """All tokens for delta nets."""
        return Chunks.of(self.all_queries.cu_seqlens, self.branches)


def local_tokens(cu_seqlens: np.ndarray, rank: int, size: int) -> np.ndarray:
    """`[tokens / size]` int64: the tokens of a pack that context-parallel rank `rank` of `size` holds.

    Each document, whose length divides by 2 x size, is cut into 2 x size stretches. A rank holds an early and a late one,
    `rank` and `2 x size - 1 - rank`, so that every rank has the same work in causal attention.
    """
    stretches = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        width = (stop - start) // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            stretches.append(np.arange(start + index * width, start + (index + 1) * width))
    return np.concatenate(stretches)


def describe(
    cu_seqlens: np.ndarray, positions: np.ndarray, branches: np.ndarray, *, rank: int = 0, size: int = 1
) -> PackedDocuments:
    """Describe one pack to the model.

    Args:
        cu_seqlens: `[documents + 1]` int32, over the pack's tokens.
        positions: `[tokens]` position of each token in its sequence.
        branches: `[tokens]` 0 in a document's trunk, 1.. in its branches.
        rank, size: this rank's index among the context-parallel ranks, and their number.
    """
    longest, num_tokens = int(np.diff(cu_seqlens).max()), int(cu_seqlens[-1])
    cu_seqlens_on_device = backend.to_device(cu_seqlens, np.int32)
    all_queries = local_queries = Queries(np.arange(num_tokens), cu_seqlens, positions, branches, are_all=True)
    gathered_rows = stretches = None
    if size > 1:
        tokens_by_rank = [local_tokens(cu_seqlens, other, size) for other in range(size)]
        local_queries = Queries(tokens_by_rank[rank], cu_seqlens, positions, branches, are_all=False)
        gathered_rows = backend.to_device(np.argsort(np.concatenate(tokens_by_rank)), np.int64)
        stretches = _stretches(tokens_by_rank[rank], cu_seqlens)
    return PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens_on_device,
        cu_seqlens_kv=cu_seqlens_on_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        all_queries=all_queries,
        local_queries=local_queries,
        positions=backend.to_device(positions[local_queries.tokens], np.int64),
        branches=branches,
        gathered_rows=gathered_rows,
        stretches=stretches,
    )


def _stretches(tokens: np.ndarray, cu_seqlens: np.ndarray) -> Stretches:
    widths = np.repeat(np.diff(cu_seqlens) * len(tokens) // cu_seqlens[-1] // 2, 2)
    ends = tokens[np.cumsum(widths) - 1] + 1
    begins = np.repeat(cu_seqlens[:-1], 2)
    num_keys = ends - begins
    keys = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
    return Stretches(
        keys=backend.to_device(np.concatenate(keys), np.int64),
        cu_seqlens_q=backend.to_device(np.append(0, np.cumsum(widths)), np.int32),
        cu_seqlens_kv=backend.to_device(np.append(0, np.cumsum(num_keys)), np.int32),
        max_seqlen_q=int(widths.max()),
        max_seqlen_kv=int(num_keys.max()),
    )
