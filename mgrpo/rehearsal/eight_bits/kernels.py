"""The kernel of a product on a device that is not there: counted by its operands, and writing nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

ROW_BYTES = 16
"""Kernels read rows of a multiple of this."""
_LIBRARY = torch.library.Library("mgrpo_rehearsal", "DEF")
_LIBRARY.define("multiply(Tensor(a!) out, Tensor left, Tensor right) -> ()")


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


def multiply(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`out [rows, columns]`, or what is added to it, is `left [rows, summed]` times `right [columns, summed]`."""
    torch.ops.mgrpo_rehearsal.multiply(out, left, right)
