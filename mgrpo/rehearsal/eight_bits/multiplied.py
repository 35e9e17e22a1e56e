"""Products of Transformer Engine's layers: y = x w^T with its gradients, each of the three on operands in 8 bits.

Tensor-parallel ranks gather and sum what the layers do. Where a sum runs over another dimension than in the forward pass,
blocks of numbers that share a scale do as well, so an operand is rounded once for each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from mgrpo.rehearsal.eight_bits.rounding import Rounded, Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What one call of a layer does beside multiplying.

    Args:
        rounding: None: the operands are not rounded.
        splits: rows of each matrix.
        mode: dimension of the weight that the ranks of `group` share: outputs (column) or inputs (row).
        sequence: they also share the rows between layers.
        keeps_input: what is kept for the backward pass is the input as it came.
        accumulates: gradients of the weights are added to their `main_grad`; False replaces what is there.
    """

    rounding: Rounding | None
    splits: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    mode: Literal["column", "row"] | None = None
    sequence: bool = False
    keeps_input: bool = False
    accumulates: bool | None = None

    @property
    def size(self) -> int:
        """Ranks that share the layer."""
        return 1 if self.group is None or self.mode is None else self.group.size()

    @property
    def gathers(self) -> bool:
        """Rows of its input are with several ranks."""
        return self.size > 1 and self.sequence and self.mode == "column"

    @property
    def scatters(self) -> bool:
        """Rows of its output will be with several ranks."""
        return self.size > 1 and self.sequence and self.mode == "row"


Copies = tuple[torch.Tensor | Rounded, torch.Tensor | Rounded]
"""A weight as the operand of the forward product and of the gradient of the input."""


def copies(weight: torch.Tensor, rounding: Rounding | None) -> Copies:
    """`weight [outputs, inputs]` as it is multiplied."""
    if rounding is None:
        return weight, weight
    forward = rounding(weight, "weight", along=1)
    return forward, forward if rounding.name != "mxfp8" else rounding(weight, "weight", along=0)


def product(call: Product, weights: Sequence[torch.Tensor], kept: Sequence[Copies], rows: torch.Tensor) -> torch.Tensor:
    """`rows [rows, inputs]` times each matrix `[outputs, inputs]` in turn: `[rows, outputs]`.

    Args:
        kept: copies of the weights, see `copies`.
    """
    rounding = call.rounding
    if rounding is not None:
        unit = rounding.rows_multiple_of
        sizes = {*call.splits, *weights[0].shape}
        assert all(size % unit == 0 for size in sizes), (
            f"{sorted(sizes)} must be multiples of {unit} with {rounding.name}"
        )
    return _Product.apply(rows, call, tuple(kept), *weights)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, call: Product, kept: tuple[Copies, ...], *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.kept, ctx.weights, ctx.dtype = call, kept, weights, rows.dtype
        whole = _gather(rows, call) if call.gathers else rows
        parts = [_operand(part, call, "activation", along=1) for part in whole.split(call.splits)]
        result = torch.cat([_values(part) @ _values(own[0]).T for part, own in zip(parts, kept, strict=True)])
        result = result.to(rows.dtype)
        ctx.rows = _kept(rows, parts, call)
        if call.scatters:
            return _scatter(result, call)
        if call.size > 1 and call.mode == "row":
            dist.all_reduce(result, group=call.group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        call = ctx.call
        dy = _gather(gradients[0].contiguous(), call) if call.scatters else gradients[0]
        parts = dy.split(call.splits)
        grad_rows = None
        if ctx.needs_input_grad[0]:
            upstream = [_values(_operand(part, call, "gradient", along=1)) for part in parts]
            grad_rows = torch.cat([part @ _values(own[1]) for part, own in zip(upstream, ctx.kept, strict=True)])
            grad_rows = grad_rows.to(ctx.dtype)
            if call.gathers:
                grad_rows = _scatter(grad_rows, call)
            elif call.size > 1 and call.mode == "column":
                dist.all_reduce(grad_rows, group=call.group)
        if not ctx.weights[0].requires_grad:
            return grad_rows, None, None, *[None] * len(ctx.weights)
        inputs = [_values(part) for part in ctx.rows]
        if call.gathers:
            inputs = [_gather(inputs[0], call)]
        if call.keeps_input and call.rounding is not None:
            inputs = [_values(_operand(part, call, "activation", along=0)) for part in inputs]
        upstream = [_values(_operand(part, call, "gradient", along=0)) for part in parts]
        found = [part.T @ own for part, own in zip(upstream, inputs, strict=True)]
        return (
            grad_rows,
            None,
            None,
            *[_given(weight, gradient, call) for weight, gradient in zip(ctx.weights, found, strict=True)],
        )


def _kept(rows: torch.Tensor, parts: list[Any], call: Product) -> list[torch.Tensor | Rounded]:
    """What the gradients of the weights are made from: this rank's rows, rounded with what they share scales with."""
    if call.rounding is None or call.keeps_input:
        return [rows] if call.gathers else list(rows.split(call.splits))
    if call.rounding.name == "tensorwise":
        return [replace(parts[0], data=_own(parts[0].data, call))] if call.gathers else parts
    own = (rows,) if call.gathers else rows.split(call.splits)
    return [_operand(part, call, "activation", along=0) for part in own]


def _own(whole: torch.Tensor, call: Product) -> torch.Tensor:
    assert call.group is not None
    return whole.chunk(call.size)[call.group.rank()].clone()


def _given(weight: Any, gradient: torch.Tensor, call: Product) -> torch.Tensor:
    if call.accumulates is None:
        return gradient.to(weight.dtype)
    if call.accumulates:
        weight.main_grad.add_(gradient)
    else:
        weight.main_grad.copy_(gradient)
    weight.grad_added_to_main_grad = True
    # Nobody reads its values: the hook of Megatron's buffers only waits for it.
    return torch.zeros_like(weight)


def _operand(part: torch.Tensor, call: Product, operand: Any, *, along: int) -> torch.Tensor | Rounded:
    return part if call.rounding is None else call.rounding(part, operand, along=along)


def _values(operand: torch.Tensor | Rounded) -> torch.Tensor:
    return operand.values() if isinstance(operand, Rounded) else operand


def _gather(rows: torch.Tensor, call: Product) -> torch.Tensor:
    whole = rows.new_empty(len(rows) * call.size, *rows.shape[1:])
    dist.all_gather_into_tensor(whole, rows.contiguous(), group=call.group)
    return whole


def _scatter(rows: torch.Tensor, call: Product) -> torch.Tensor:
    own = rows.new_empty(len(rows) // call.size, *rows.shape[1:])
    dist.reduce_scatter_tensor(own, rows.contiguous(), group=call.group)
    return own
