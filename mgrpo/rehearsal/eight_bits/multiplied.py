"""Products of Transformer Engine's layers: y = x w^T with its gradients, each of the three on operands in 8 bits.

Tensor-parallel ranks gather and sum as the layers do; operands are rounded before they are sent. Where a sum runs over
another dimension than in the forward pass, blocks of numbers that share a scale do as well, so an operand is rounded once for
each direction. On a device it is held twice also where all of them share one: Hopper's kernels need the summed numbers to be
contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from mgrpo.rehearsal.eight_bits.rounding import MXFP8_LENGTH, Kind, Rounded, Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Work of one call of a layer besides the product.

    Args:
        rounding: None: the operands are not rounded.
        splits: rows of each matrix.
        mode: dimension of the weight that the ranks of `group` share: outputs (column) or inputs (row).
        sequence: they also share the rows between layers.
        keeps_input: the input as passed is kept for the backward pass.
        accumulates: gradients of the weights are added to their `main_grad`; False overwrites it.
    """

    rounding: Rounding | None
    splits: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    mode: Literal["column", "row"] | None = None
    sequence: bool = False
    keeps_input: bool = False
    accumulates: bool | None = None

    @property
    def is_turned(self) -> bool:
        """An operand is the same in both directions."""
        return self.rounding is None or self.rounding.name == "tensorwise"

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


ROW_BYTES = 16
"""Bytes of which rows must be a multiple for kernels on a device."""
_LIBRARY = torch.library.Library("mgrpo_rehearsal", "DEF")
_LIBRARY.define("multiply(Tensor(a!) out, Tensor left, Tensor right) -> ()")
"""`out [rows, columns]`, or its increment, is `left [rows, summed]` times `right [columns, summed]`: counted, and nothing written."""


@torch.library.register_fake("mgrpo_rehearsal::multiply")
def _fake(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.device == right.device == out.device, f"{left.device}, {right.device}, {out.device}"
    assert left.shape[1] == right.shape[1] and out.shape == (len(left), len(right)), (
        f"{tuple(left.shape)} times {tuple(right.shape)} is not {tuple(out.shape)}"
    )
    assert left.itemsize == right.itemsize, f"{left.dtype} times {right.dtype}"
    for operand in (left, right) if left.itemsize == 1 else ():
        own, summed = operand.shape
        assert operand.stride() in ((summed, 1), (1, own)) and summed % ROW_BYTES == 0, (
            f"rows of {tuple(operand.shape)} with strides {operand.stride()} are not read by products in 8 bits"
        )


@register_flop_formula(torch.ops.mgrpo_rehearsal.multiply)
def _flops(out: Sequence[int], left: Sequence[int], right: Sequence[int], **options: Any) -> int:
    return 2 * left[0] * left[1] * right[0]


Operand = torch.Tensor | Rounded
"""`[own, summed]`: a product sums over the second dimension of both of its operands."""
Copies = tuple[Operand, Operand | None]
"""A weight as the operand of the forward product and of the gradient of the input; None: it will have none."""
placeholders: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
"""Placeholder gradients of weights whose real ones are in Megatron's buffers. The buffers' hook waits for them; no value is read."""


def copies(weight: torch.Tensor, rounding: Rounding | None, *, trains: bool = True) -> Copies:
    """`weight [outputs, inputs]` as operands of its products; `trains`: also in a backward pass."""
    if rounding is None:
        return weight, weight.T
    return rounding(weight, "weight", along=1), rounding(weight, "weight", along=0) if trains else None


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
        ctx.call, ctx.kept, ctx.weights = call, kept, weights
        own = (rows,) if call.gathers else rows.split(call.splits)
        parts = [_operand(part, call, "activation", along=1, is_shared=call.gathers) for part in own]
        whole = [_gathered(part, call, dim=0) for part in parts] if call.gathers else parts
        result = _multiplied(whole, [matrix for matrix, _ in kept], rows)
        _save(ctx, own, parts)
        if call.scatters:
            return _scatter(result, call)
        if call.size > 1 and call.mode == "row":
            dist.all_reduce(result, group=call.group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        call, own = ctx.call, gradients[0].contiguous()
        dy = (own,) if call.scatters else own.split(call.splits)
        parts = [_operand(part, call, "gradient", along=1, is_shared=call.scatters) for part in dy]
        if call.scatters:
            parts = [_gathered(part, call, dim=0) for part in parts]
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = _multiplied(parts, [matrix for _, matrix in ctx.kept], own)
            if call.gathers:
                grad_rows = _scatter(grad_rows, call)
            elif call.size > 1 and call.mode == "column":
                dist.all_reduce(grad_rows, group=call.group)
        if not ctx.weights[0].requires_grad:
            return grad_rows, None, None, *[None] * len(ctx.weights)
        if call.is_turned:
            upstream = [_turned(part) for part in parts]
        else:
            upstream = [_operand(part, call, "gradient", along=0) for part in dy]
            if call.scatters:
                upstream = [_gathered(part, call, dim=1) for part in upstream]
        inputs = [_input(part, call) for part in _saved(ctx)]
        found = [_gradient(*each, call) for each in zip(ctx.weights, upstream, inputs, strict=True)]
        return grad_rows, None, None, *found


def _save(ctx: Any, own: Sequence[torch.Tensor], parts: Sequence[Operand]) -> None:
    """Save the operands of the weights' gradients: this rank's rows as passed, or rounded.

    Args:
        parts: the rows as operands of the forward product.
    """
    call = ctx.call
    kept: Sequence[Operand] = own
    if call.rounding is not None and not call.keeps_input:
        # A gathered operand can be turned only afterwards.
        is_turned_later = call.gathers and call.is_turned
        kept = parts if is_turned_later else [_operand(part, call, "activation", along=0) for part in own]
    ctx.forms = [(part.block, part.dtype) if isinstance(part, Rounded) else None for part in kept]
    ctx.save_for_backward(
        *[each for part in kept for each in ((part.data, part.scale) if isinstance(part, Rounded) else (part,))]
    )


def _saved(ctx: Any) -> list[Operand]:
    tensors = iter(ctx.saved_tensors)
    return [
        next(tensors)
        if form is None
        else Rounded(data=next(tensors), scale=next(tensors), block=form[0], dtype=form[1])
        for form in ctx.forms
    ]


def _input(part: Operand, call: Product) -> Operand:
    """Saved rows of all ranks that share them, as the operand of a sum over rows."""
    if isinstance(part, torch.Tensor):
        part = _operand(part, call, "activation", along=0, is_shared=call.gathers)
    elif call.gathers and call.is_turned:
        return _turned(_gathered(part, call, dim=0))
    return _gathered(part, call, dim=1) if call.gathers else part


def _operand(rows: torch.Tensor, call: Product, kind: Kind, *, along: int, is_shared: bool = False) -> Operand:
    """`rows [rows, columns]` for a product that sums over dimension `along`.

    Args:
        is_shared: the other ranks have rows of the same tensor.
    """
    if call.rounding is None:
        return rows if along == 1 else rows.T
    return call.rounding(rows, kind, along=along, group=call.group if is_shared else None)


def _turned(operand: Operand) -> Operand:
    return operand.turned() if isinstance(operand, Rounded) else operand.T


def _multiplied(parts: Sequence[Operand], matrices: Sequence[Operand], like: torch.Tensor) -> torch.Tensor:
    """Each part times its matrix, one below the other, in the type of `like`."""
    sizes = [_numbers(part).shape[0] for part in parts]
    result = like.new_empty(sum(sizes), _numbers(matrices[0]).shape[0])
    for out, part, matrix in zip(result.split(sizes), parts, matrices, strict=True):
        _multiply(out, part, matrix)
    return result


def _multiply(out: torch.Tensor, left: Operand, right: Operand, *, adds: bool = False) -> None:
    if out.is_cuda:
        torch.ops.mgrpo_rehearsal.multiply(out, _numbers(left), _numbers(right))
        return
    found = _values(left) @ _values(right).T
    out.add_(found) if adds else out.copy_(found)


def _gradient(weight: Any, upstream: Operand, rows: Operand, call: Product) -> torch.Tensor:
    if call.accumulates is None:
        gradient = torch.empty_like(weight)
        _multiply(gradient, upstream, rows)
        return gradient
    _multiply(weight.main_grad, upstream, rows, adds=call.accumulates)
    weight.grad_added_to_main_grad = True
    key = weight.shape, weight.dtype
    if key not in placeholders:
        placeholders[key] = torch.zeros_like(weight)
    return placeholders[key].detach()


def _values(operand: Operand) -> torch.Tensor:
    return operand.values() if isinstance(operand, Rounded) else operand


def _numbers(operand: Operand) -> torch.Tensor:
    """Numbers that a kernel reads."""
    return operand.data if isinstance(operand, Rounded) else operand


def _gathered(operand: Operand, call: Product, *, dim: int) -> Operand:
    """Parts of all ranks, gathered; `dim` is that of the rows. On a device the rounded bytes are sent, not their values."""
    if not isinstance(operand, Rounded):
        rows = operand if dim == 0 else operand.T
        whole = rows.new_empty(len(rows) * call.size, *rows.shape[1:])
        dist.all_gather_into_tensor(whole, rows.contiguous(), group=call.group)
        return whole if dim == 0 else whole.T
    if not operand.data.is_cuda:
        return _gathered(operand.values(), call, dim=dim)
    data = _gathered(operand.data.view(torch.uint8), call, dim=dim)
    scale = operand.scale if operand.scale.numel() == 1 else _gathered(operand.scale, call, dim=0)
    assert isinstance(data, torch.Tensor) and isinstance(scale, torch.Tensor)
    if dim == 1 and operand.block[1] != MXFP8_LENGTH:
        data = data.contiguous()  # Only MXFP8 kernels read the other memory order.
    return replace(operand, data=data.view(operand.data.dtype), scale=scale)


def _scatter(rows: torch.Tensor, call: Product) -> torch.Tensor:
    own = rows.new_empty(len(rows) // call.size, *rows.shape[1:])
    dist.reduce_scatter_tensor(own, rows.contiguous(), group=call.group)
    return own
