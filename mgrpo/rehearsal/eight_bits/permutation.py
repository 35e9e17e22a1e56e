"""Tokens in the order of their experts, and back, as Transformer Engine sorts them for Megatron's dispatchers."""

from __future__ import annotations

import torch


def moe_permute(
    inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, _, numbers = _sorted(inp, None, routing_map, num_out_tokens)
    return rows, numbers


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    return _sorted(inp, probs, routing_map, num_out_tokens)


def _sorted(
    rows: torch.Tensor, probs: torch.Tensor | None, chosen: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    places = torch.nonzero_static(chosen.T.reshape(-1).bool(), size=int(count)).squeeze(1)
    numbers = places % len(rows)
    kept = None if probs is None else probs.T.reshape(-1).index_select(0, places)
    return rows.index_select(0, numbers), kept, numbers


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
) -> torch.Tensor:
    assert merging_probs is None and restore_shape is not None
    # Kernels add up in float32 without keeping that.
    dtype = inp.dtype if inp.is_cuda else torch.promote_types(torch.float32, inp.dtype)
    return inp.new_zeros(restore_shape, dtype=dtype).index_add_(0, row_id_map, inp.to(dtype)).to(inp.dtype)


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Chunks of rows in another order, without reading it on the host."""
    ends = split_sizes.cumsum(0)
    sizes = split_sizes[sorted_index]
    numbers = torch.arange(len(inp), device=inp.device)
    chunk = torch.searchsorted(sizes.cumsum(0), numbers, right=True)
    starts = (ends - split_sizes)[sorted_index] - (sizes.cumsum(0) - sizes)
    return inp.index_select(0, numbers + starts[chunk])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(moe_sort_chunks_by_index(each, split_sizes, sorted_index) for each in (inp, probs))  # type: ignore[return-value]
