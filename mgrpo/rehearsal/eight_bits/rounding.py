"""Values in 8 bits as the recipes scale them.

A scale brings the largest magnitude of the numbers that share it to the largest of the format. They are

    tensorwise    all of a tensor; the scale is any float32
    blockwise     128 along the sum of a product, 128 x 128 of a weight; a power of two
    mxfp8         32 along the sum of a product; a power of two

A number is then rounded to the nearest of the format: relatively by at most 2^-4 (e4m3) or 2^-3 (e5m2), and absolutely by at
most half of the smallest number, 2^-10 or 2^-17, times the inverse of the scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

MXFP8_LENGTH = 32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Name = Literal["tensorwise", "blockwise", "mxfp8"]
Kind = Literal["activation", "weight", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """An operand of a product, which sums over its second dimension: bytes `data [own, summed]` times `scale`.

    Args:
        scale: float32, of each block; on a device unread, in the shape that kernels take.
        dtype: of the matrix before.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    dtype: torch.dtype

    def values(self) -> torch.Tensor:
        """`[own, summed]` in float32, or float64 if the matrix was."""
        wide = torch.promote_types(torch.float32, self.dtype)
        return self.data.to(wide) * _spread(self.scale, self.block, self.data).to(wide)

    def turned(self) -> Rounded:
        """`[summed, own]`, where all numbers share a scale: kernels need the summed dimension to be contiguous."""
        return replace(self, data=self.data.T.contiguous(), scale=self.scale.T, block=self.block[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """A recipe.

    Args:
        forward: format of activations and weights.
        backward: of gradients.
    """

    name: Name
    forward: torch.dtype = E4M3
    backward: torch.dtype = E5M2

    @property
    def rows_multiple_of(self) -> int:
        """Rows of a product, and the widths of its matrices, are a multiple of this."""
        return MXFP8_LENGTH if self.name == "mxfp8" else 16

    def __call__(
        self, matrix: torch.Tensor, kind: Kind, *, along: int, group: dist.ProcessGroup | None = None
    ) -> Rounded:
        """The operand of a product that sums over dimension `along` of `matrix [rows, columns]`, which becomes the second.

        Args:
            group: ranks that hold other rows of one tensor; they must all call.
        """
        if along == 0:
            matrix = matrix.T
        block = self._block(matrix, kind)
        dtype = self.backward if kind == "gradient" else self.forward
        if matrix.is_cuda:
            return self._on_device(matrix, block, dtype, group)
        largest = torch.finfo(dtype).max
        wide = matrix.to(torch.promote_types(torch.float32, matrix.dtype))
        peak = _peaks(wide, block).float()
        if group is not None and self.name == "tensorwise":
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        scale = largest / peak.where(peak > 0, largest)
        if self.name != "tensorwise":
            # The exponent alone: a power of two that is not above the scale.
            scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
        data = (wide * _spread(scale, block, matrix)).clamp(-largest, largest).to(dtype)
        return Rounded(data=data, scale=1 / scale, block=block, dtype=matrix.dtype)

    def _block(self, matrix: torch.Tensor, kind: Kind) -> tuple[int, int]:
        if self.name == "tensorwise":
            own, summed = matrix.shape
            return max(own, 1), max(summed, 1)
        if self.name == "blockwise" and kind == "weight":
            return 128, 128
        return 1, MXFP8_LENGTH if self.name == "mxfp8" else 128

    def _on_device(
        self, matrix: torch.Tensor, block: tuple[int, int], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Rounded:
        """Allocations of Transformer Engine: a byte a number, and scales padded for the kernels."""
        own, summed = -(-matrix.shape[0] // block[0]), -(-matrix.shape[1] // block[1])
        if self.name == "mxfp8":
            scale = matrix.new_empty(_padded(own, 128), _padded(summed, 4), dtype=torch.uint8)
        elif block[0] == 1:
            scale = matrix.new_empty(summed, _padded(own, 4), dtype=torch.float32)
        else:
            scale = matrix.new_empty(own, 1 if self.name == "tensorwise" else _padded(summed, 4), dtype=torch.float32)
        if group is not None and self.name == "tensorwise":
            dist.all_reduce(scale, dist.ReduceOp.MAX, group=group)
        return Rounded(data=matrix.new_empty(matrix.shape, dtype=dtype), scale=scale, block=block, dtype=matrix.dtype)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _peaks(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block, the last of which may be cut off: `[rows / block, columns / block]`."""
    rows, columns = matrix.shape
    whole = F.pad(matrix.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    return whole.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1])).amax((1, 3))


def _spread(scale: torch.Tensor, block: tuple[int, int], matrix: torch.Tensor) -> torch.Tensor:
    """The scale of each number of a matrix, `[rows, columns]`, or `[1, 1]` if all have the same."""
    if scale.numel() == 1:
        return scale
    rows, columns = matrix.shape
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
