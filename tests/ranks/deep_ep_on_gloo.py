"""A package deep_ep for ranks without GPUs: what Megatron calls of DeepEP and HybridEP, with their signatures, by collectives of gloo.

A row travels once to each rank that has an expert of it, as with the package; types and the order of rows are the sender's.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist


class Event:
    """Of work that is done."""

    def __init__(self, event: Any = None) -> None: ...

    def current_stream_wait(self) -> None: ...


class Buffer:
    """Exchanges rows between the ranks of a group."""

    dispatched = 0
    """Rows that this process has sent."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None: ...

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: hidden_bytes,
            get_rdma_buffer_size_hint=lambda hidden_bytes, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        owner, ranks = topk_idx // (num_experts // self.group.size()), torch.arange(self.group.size())
        in_rank = (owner[:, :, None] == ranks).any(1)
        return in_rank.sum(0), None, per_expert, in_rank, Event()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            rows, sent, received, _ = handle
            return self._swap(x[rows], sent, received), None, None, None, None, Event()
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype == torch.float32
        size, rank = self.group.size(), self.group.rank()
        rows = torch.cat([is_token_in_rank[:, other].nonzero().flatten() for other in range(size)])
        sent = is_token_in_rank.sum(0).tolist()
        counts = torch.empty(size, dtype=torch.int64)
        dist.all_to_all_single(counts, torch.tensor(sent), group=self.group)
        received = counts.tolist()
        Buffer.dispatched += len(rows)
        share = len(num_tokens_per_expert) // size
        local = self._swap(topk_idx[rows], sent, received) - rank * share
        is_own = (local >= 0) & (local < share)
        weights = self._swap(topk_weights[rows], sent, received).where(is_own, 0)
        local = local.where(is_own, -1)
        per_expert = torch.bincount(local[is_own], minlength=share).tolist()
        found = self._swap(x[rows], sent, received)
        return found, local, weights, per_expert, (rows, sent, received, len(x)), Event()

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...],
        topk_weights: torch.Tensor | None = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Event]:
        def summed(values: torch.Tensor) -> torch.Tensor:
            rows, sent, received, count = handle
            back = self._swap(values, received, sent)
            return back.new_zeros(count, *back.shape[1:]).index_add_(0, rows, back)

        return summed(x), None if topk_weights is None else summed(topk_weights), Event()

    def _swap(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=self.group)
        return found


class _Sent(torch.autograd.Function):
    """Rows and weights to the ranks of their experts, and gradients back; `move` sends rows of any width."""

    @staticmethod
    def forward(ctx: Any, handle: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle = handle
        return tuple(handle(each) for each in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, *(ctx.handle.back(each) for each in gradients)


class _Sum(torch.autograd.Function):
    """The way back, whose gradient goes there again."""

    @staticmethod
    def forward(ctx: Any, handle: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.handle = handle
        return handle.back(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, ctx.handle(gradient)


class _Way:
    """Of the copies of each row to their experts, sorted by them there."""

    def __init__(self, chosen: torch.Tensor, group: dist.ProcessGroup, local_experts: int) -> None:
        self.count, self.experts = chosen.shape
        places = chosen.T.reshape(-1).nonzero().flatten()
        self.rows, self.expert = places % self.count, places // self.count
        size = group.size()
        sent = chosen.sum(0).view(size, local_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        self.sent, self.received, self.group = sent.sum(1).tolist(), received.sum(1).tolist(), group
        owner = torch.arange(local_experts).repeat(size).repeat_interleave(received.flatten())
        self.order = owner.argsort(stable=True)
        self.per_expert = received.sum(0)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """`[rows, width]`, or of weights `[rows, experts]` each copy's own."""
        copies = values[self.rows, self.expert] if values.shape[1] == self.experts else values[self.rows]
        found = copies.new_empty(sum(self.received), *copies.shape[1:])
        dist.all_to_all_single(found, copies.contiguous(), self.received, self.sent, group=self.group)
        return found[self.order]

    def back(self, values: torch.Tensor) -> torch.Tensor:
        found = values.new_empty(len(self.rows), *values.shape[1:])
        unsorted = torch.empty_like(values).index_copy_(0, self.order, values).contiguous()
        dist.all_to_all_single(found, unsorted, self.sent, self.received, group=self.group)
        if values.dim() == 1:
            return values.new_zeros(self.count, self.experts).index_put_((self.rows, self.expert), found)
        return found.new_zeros(self.count, *found.shape[1:]).index_add_(0, self.rows, found)


def hybrid_ep_dispatch(
    x: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor,
    group: dist.ProcessGroup,
    num_local_experts: int,
    num_sms_dispatch_api: int = 24,
    num_sms_combine_api: int = 24,
    num_permuted_tokens: int | None = None,
    pad_multiple: int | None = None,
) -> tuple[Any, ...]:
    """As Megatron calls HybridEP, which sorts the rows by expert itself."""
    assert num_permuted_tokens is None and pad_multiple is None
    way = _Way(routing_map, group, num_local_experts)
    Buffer.dispatched += len(way.rows)
    rows, weights = _Sent.apply(way, x, probs)
    return rows, weights, None, way.per_expert, way


def hybrid_ep_combine(
    x: torch.Tensor, handle: Any, num_permuted_tokens: torch.Tensor | None = None, pad_multiple: int | None = None
) -> torch.Tensor:
    """The sums of each row's copies."""
    found: torch.Tensor = _Sum.apply(handle, x)
    return found


@contextmanager
def installed() -> Iterator[None]:
    """Megatron's flex dispatcher sends by these within."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    package, parts = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    vars(package)["Buffer"] = Buffer
    vars(parts).update(EventHandle=Event, EventOverlap=Event)
    names = ("fused_dispatch", "fused_combine", "set_deepep_num_sms")
    try:
        with patch.dict(sys.modules, {"deep_ep": package, "deep_ep.utils": parts}):
            importlib.reload(fused_a2a)
        replaced = {name: getattr(fused_a2a, name) for name in names}
        replaced |= {"hybrid_ep_dispatch": hybrid_ep_dispatch, "hybrid_ep_combine": hybrid_ep_combine}
        with patch.multiple(token_dispatcher, **replaced):
            yield
    finally:
        importlib.reload(fused_a2a)
