"""Low-rank adapters (LoRA, arXiv 2106.09685) in Megatron's linear layers and in grouped experts, on every layout.

A merged layer computes with W' = round(W + scale B A) in W's own dtype: with exactly the weights that engines receive.
Rounded only there, an update of less than half a step of bfloat16 would exist in the trainer and not in the engines. W' is
made anew in the forward and in the backward pass, so at most one layer's exists at a time. With engines that hold W and
receive A and scale B, a layer computes with these three, rounded to W's dtype as for the engines. With h = x A^T and u = dy scale B,
    dB = scale dy^T h     dA = u^T x     dx = dy W'  or  dy W + u A
where the rounding counts as the identity. Exchanges between tensor ranks for A and B are rank wide, never hidden wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from mgrpo.parallel.moe.experts import ALIGNMENT, GroupedLinear, without_idle


class LoraAdapter(torch.nn.Module):
    """A and B of one linear layer; its `forward` is the product with W + scale B A.

    a: `[experts * parts * rank, inputs]` float32, b: `[experts * outputs, rank]` float32, of a layer of
    `[experts * outputs, inputs]`; see `mgrpo.models.adapters`. Megatron's own layers are one expert.

    Args:
        parts: number of matrices of an expert that have an A.
        part_of_row: `[outputs]` int64: the matrix that a row of an expert belongs to; -1: none.
        is_merged: see `mgrpo.models.adapters.LoraShape`.
    """

    of_part: torch.Tensor
    """`[outputs, parts, 1]` float32: 1 where a row belongs to a part."""

    def __init__(
        self, layer: Any, *, rank: int, scale: float, parts: int, part_of_row: torch.Tensor, is_merged: bool
    ) -> None:
        super().__init__()
        weight, is_grouped = layer.weight, isinstance(layer, GroupedLinear)
        self.is_grouped, self.experts = is_grouped, layer.experts if is_grouped else 1
        self.rank, self.scale, self.is_merged = rank, scale, is_merged
        self.group: dist.ProcessGroup | None = layer.group if is_grouped else layer.tp_group
        """Ranks that hold shares of the same matrices; None: each tensor rank holds them whole."""
        self.splits_inputs = layer.split_dim == 1 if is_grouped else isinstance(layer, RowParallelLinear)
        self.is_enabled = True
        options: dict[str, Any] = {"dtype": torch.float32, "device": weight.device}
        self.a = torch.nn.Parameter(torch.zeros(self.experts * parts * rank, weight.shape[1], **options))
        self.b = torch.nn.Parameter(torch.zeros(weight.shape[0], rank, **options))
        of_part = part_of_row.to(weight.device)[:, None] == torch.arange(parts, device=weight.device)
        self.register_buffer("of_part", of_part.to(torch.float32)[:, :, None], persistent=False)
        # Megatron's gradient norm counts weights marked as split on all tensor ranks, and others on the first.
        holds_whole_experts = is_grouped and layer.group.size() == 1
        if self.splits_inputs or holds_whole_experts:
            set_tensor_model_parallel_attributes(self.a, True, 1, 1)
        if self.group and (not self.splits_inputs or holds_whole_experts):
            set_tensor_model_parallel_attributes(self.b, True, 0, 1)
        for own in (self.a, self.b):
            marked: Any = own
            marked.allreduce = weight.allreduce
        # From this rank's own tokens alone: Megatron adds it up over tensor ranks.
        own_tokens = not self.splits_inputs and not is_grouped and layer.sequence_parallel
        marked = self.a
        marked.sequence_parallel = own_tokens
        marked = self.b
        marked.sequence_parallel = own_tokens and self.group is None

    def matrices_a(self) -> torch.Tensor:
        """`[experts, parts * rank, inputs]`."""
        return self.a.view(self.experts, -1, self.a.shape[1])

    def matrices_b(self) -> torch.Tensor:
        """`[experts, outputs, parts * rank]`: b, and 0 where a row does not belong to the part."""
        return (self.b.view(self.experts, -1, 1, self.rank) * self.of_part).flatten(2)

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """W', of the shape and dtype of the layer's own `weight`. Not collective."""
        delta = torch.bmm(self.matrices_b(), self.matrices_a()).view_as(weight)
        return delta.mul_(self.scale).add_(weight).to(weight.dtype)

    @torch.no_grad()
    def scaled_b(self) -> torch.Tensor:
        """scale B, of the shape of b. Not collective."""
        return self.b * self.scale

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`matrices_a` and scale times `matrices_b`, rounded to `dtype`; of grouped experts with a width that CUDA can multiply."""
        a, b = self.matrices_a().to(dtype), (self.matrices_b() * self.scale).to(dtype)
        missing = -a.shape[1] % ALIGNMENT if self.is_grouped else 0
        return F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))

    @torch.no_grad()
    def squares(self, weight: torch.Tensor) -> torch.Tensor:
        """`[2]` float64: the squared norms of scale B A and of `weight`, in the rows of adapted matrices. Not collective."""
        a, b = self.matrices_a().double(), self.matrices_b().double()
        # |B A|^2 = tr(B^T B A A^T): nothing as large as the weight is made.
        update = self.scale**2 * (b.mT @ b * (a @ a.mT)).sum()
        rows = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).view(self.experts, -1)
        return torch.stack((update, (rows.double().square() * self.of_part.sum((1, 2))).sum()))

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        ends: torch.Tensor | None = None,
        reduces_dgrad: bool = False,
        sequence_parallel: bool = False,
    ) -> torch.Tensor:
        """The product of the layer: `[..., inputs]` -> `[..., outputs]`; see `GroupedLinear` and Megatron's layers for the arguments."""
        return _Product.apply(x, weight, self.a, self.b, self, ends, reduces_dgrad, sequence_parallel)

    def adapt(self, layer: Any) -> None:
        """Become a part of the layer, which from now on computes with A and B as long as this is enabled."""
        layer.adapter = self
        layer._forward_impl = _own(layer) if self.is_grouped or self.group is None else _parallel(layer)


def _parallel(layer: Any) -> Callable[..., torch.Tensor]:
    plain = layer._forward_impl

    def forward(input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        if not layer.adapter.is_enabled:
            return plain(input, weight, **options)
        product = layer.adapter(
            input,
            weight,
            reduces_dgrad=options["allreduce_dgrad"],
            sequence_parallel=options["sequence_parallel"],
        )
        return product if options["bias"] is None else product + options["bias"]

    return forward


def _own(layer: Any) -> Callable[..., torch.Tensor]:
    plain = layer._forward_impl

    def forward(rows: torch.Tensor, **ends: torch.Tensor) -> torch.Tensor:
        return layer.adapter(rows, layer.weight, **ends) if layer.adapter.is_enabled else plain(rows, **ends)

    return forward


class _Product(torch.autograd.Function):
    """See `LoraAdapter.forward`. Messages for A and B: in the backward pass, one all-reduce of `[tokens, parts * rank]`; under
    sequence parallelism an all-gather and a reduce-scatter of it instead."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        adapter: LoraAdapter,
        ends: torch.Tensor | None,
        reduces_dgrad: bool,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, a, b, ends)
        ctx.adapter, ctx.reduces_dgrad, ctx.sequence_parallel = adapter, reduces_dgrad, sequence_parallel
        if sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=adapter.group)
        inputs = x.flatten(0, -2)
        rows = _times(inputs, _matrices(adapter, weight).mT, ends)
        if not adapter.is_merged:
            a, b = adapter.factors(x.dtype)
            rows += _times(_times(inputs, a.mT, ends), b.mT, ends)
        return rows.view(*x.shape[:-1], rows.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *_, ends = ctx.saved_tensors
        adapter: LoraAdapter = ctx.adapter
        group = adapter.group
        is_shared = group is not None and group.size() > 1
        rows, dy = x.flatten(0, -2), gradients[0].flatten(0, -2)
        a, b = adapter.factors(x.dtype)
        dx, u = _times(dy, _matrices(adapter, weight), ends), _times(dy, b, ends)
        if not adapter.is_merged:
            dx += _times(u, a, ends)
        summed = dist.all_reduce(dx, group=group, async_op=True) if ctx.reduces_dgrad else None
        if ctx.sequence_parallel:
            dx = reduce_scatter_to_sequence_parallel_region(dx, group=group)
        h = _times(rows, a.mT, ends)
        if ctx.sequence_parallel:
            h = gather_from_sequence_parallel_region(h, group=group)
            u = reduce_scatter_to_sequence_parallel_region(u, group=group)
        elif is_shared:
            dist.all_reduce(h if adapter.splits_inputs else u, group=group)
        width = adapter.matrices_a().shape[1]
        da = _outer(u, rows, ends, adapter.experts)[:, :width].float()
        db = _outer(dy, h, ends, adapter.experts)[..., :width].float() * adapter.scale
        db = (db.unflatten(2, (-1, adapter.rank)) * adapter.of_part).sum(2)
        if summed is not None:
            summed.wait()
        return dx.view_as(x), None, da.flatten(0, 1), db.flatten(0, 1), None, None, None, None


def _matrices(adapter: LoraAdapter, weight: torch.Tensor) -> torch.Tensor:
    """`[experts, outputs, inputs]`: W' where adapters are merged, else W."""
    return (adapter.merged(weight) if adapter.is_merged else weight).view(adapter.experts, -1, weight.shape[1])


def _times(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """`[rows, n]` times the `[experts, n, m]` matrix of its expert; rows of expert i end before row `ends[i]`."""
    return rows @ matrices[0] if ends is None or len(rows) == 0 else F.grouped_mm(rows, matrices, offs=ends)


def _outer(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor | None, experts: int) -> torch.Tensor:
    """`[experts, n, m]`: the sum over each expert's rows of x `[rows, n]` times y `[rows, m]`."""
    if ends is None:
        return (x.T @ y)[None]
    if len(x) == 0:
        return x.new_zeros(experts, x.shape[1], y.shape[1])
    return without_idle(F.grouped_mm(x.T, y, offs=ends), ends)
