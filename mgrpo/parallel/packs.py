"""What attention needs to know of a pack: its documents, who sees whom, and which tokens this rank holds.

A pack is `thd`: documents end to end, hidden states `[tokens, 1, hidden]`. Context-parallel ranks share every document;
`local_tokens` says which tokens a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from mgrpo.parallel import backend


class Queries:
    """Some of a pack's tokens as queries over all of it, in the padded form `[documents, longest]`.

    Args:
        tokens: `[queries]` which tokens, document after document.
        cu_seqlens: `[documents + 1]` over the pack's tokens.
        positions, branches: `[tokens]`, as in `describe`.
        are_all: whether these are all tokens of the pack.
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
        """`[queries]` int64: row of each query in the padded `[documents * longest]`."""
        # The only branch of a document sees all of it: plain causal attention.
        self.has_branches = bool(branches.max() > 1)
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> torch.Tensor | None:
        """`[documents, 1, longest, longest key]` bool: who sees whom; None where plain causal attention is the same.

        A token sees the earlier tokens of its own branch and of the trunk, at most `window` positions back, itself included.
        """
        if window not in self._masks:
            is_short = window is None or window >= int(np.diff(self.cu_seqlens).max())
            is_plain = self.are_all and is_short and not self.has_branches
            dense = None if is_plain else torch.from_numpy(self._dense_mask(window))
            self._masks[window] = dense if dense is None else dense.to(backend.device())
        return self._masks[window]

    def block_mask(self, window: int | None, device: torch.device) -> BlockMask:
        """The same visibility as `mask`, for FlexAttention over `[queries, tokens]`."""
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
        # Columns past a document's end repeat its last token, which no query comes after.
        keys = starts + np.minimum(np.arange(lengths.max()), lengths - 1)
        flat_queries = np.full(len(lengths) * self.longest, -1)
        flat_queries[self.rows.cpu().numpy()] = self.tokens
        queries = flat_queries.reshape(len(lengths), self.longest)
        visible = starts[:, :, None] + np.arange(lengths.max()) <= queries[:, :, None]
        branches = self.branches[keys][:, None, :]
        visible &= (branches == self.branches[queries][:, :, None]) | (branches == 0)
        if window is not None:
            visible &= self.positions[queries][:, :, None] - self.positions[keys][:, None, :] < window
        # Padding sees one key, or its softmax would be 0 / 0.
        visible[queries < 0] = np.arange(lengths.max()) == 0
        return visible[:, None]


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
    """Megatron's description of a pack, and what this attention needs in addition."""

    all_queries: Queries
    """All tokens as queries."""
    local_queries: Queries
    """This rank's tokens as queries; the same object as `all_queries` without context parallelism."""
    positions: torch.Tensor
    """`[local tokens]` int64, for RoPE."""
    gathered_rows: torch.Tensor | None = None
    """`[tokens]` int64: row of each token when all ranks' tokens lie end to end; None without context parallelism."""

    @cached_property
    def stretches(self) -> Stretches:
        """The local tokens for variable-length attention."""
        tokens, cu_seqlens = self.local_queries.tokens, self.local_queries.cu_seqlens
        device = self.cu_seqlens_q.device
        widths = np.repeat(np.diff(cu_seqlens) * len(tokens) // cu_seqlens[-1] // 2, 2)
        ends = tokens[np.cumsum(widths) - 1] + 1
        begins = np.repeat(cu_seqlens[:-1], 2)
        keys = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])

        def cumulative(lengths: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(device)

        num_keys = ends - begins
        return Stretches(
            torch.from_numpy(keys).to(device),
            cumulative(widths),
            cumulative(num_keys),
            int(widths.max()),
            int(num_keys.max()),
        )


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
    device = backend.device()

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    longest, num_tokens = int(np.diff(cu_seqlens).max()), int(cu_seqlens[-1])
    cu_seqlens_on_device = torch.from_numpy(cu_seqlens.astype(np.int32)).to(device)
    all_queries = local_queries = Queries(np.arange(num_tokens), cu_seqlens, positions, branches, are_all=True)
    gathered_rows = None
    if size > 1:
        tokens_by_rank = [local_tokens(cu_seqlens, other, size) for other in range(size)]
        local_queries = Queries(tokens_by_rank[rank], cu_seqlens, positions, branches, are_all=False)
        gathered_rows = to_device(np.argsort(np.concatenate(tokens_by_rank)))
    return PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens_on_device,
        cu_seqlens_kv=cu_seqlens_on_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        all_queries=all_queries,
        local_queries=local_queries,
        positions=to_device(positions[local_queries.tokens]),
        gathered_rows=gathered_rows,
    )
