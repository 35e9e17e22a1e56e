"""Values in 8 bits as the recipes scale them.

A scale brings the largest magnitude of the numbers that share it to the largest of the format. They are

    tensorwise    all of a tensor; the scale is any float32
    blockwise     128 along the sum of a product, 128 x 128 of a weight; a power of two
    mxfp8         32 along the sum of a product; a power of two

A number is then rounded to the nearest of the format: relatively by at most 2^-4 (e4m3) or 2^-3 (e5m2), and absolutely by at
most half of the smallest number, 2^-10 or 2^-17, times the inverse of the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Name = Literal["tensorwise", "blockwise", "mxfp8"]
Operand = Literal["activation", "weight", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """A matrix as bytes and scales: `data [rows, columns]` in 8 bits times `scale`, one of each block, float32.

    Args:
        dtype: of the matrix before.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    dtype: torch.dtype

    def values(self) -> torch.Tensor:
        """`[rows, columns]` in float32, or float64 if the matrix was."""
        wide = torch.promote_types(torch.float32, self.dtype)
        return self.data.to(wide) * _spread(self.scale, self.block, self.data).to(wide)


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
        return 32 if self.name == "mxfp8" else 16

    def __call__(self, matrix: torch.Tensor, operand: Operand, *, along: int) -> Rounded:
        """The operand of a product that sums over dimension `along` of `matrix [rows, columns]`."""
        block = self._block(matrix, operand, along)
        dtype = self.backward if operand == "gradient" else self.forward
        largest = torch.finfo(dtype).max
        wide = matrix.to(torch.promote_types(torch.float32, matrix.dtype))
        peak = _peaks(wide, block).float()
        scale = largest / peak.where(peak > 0, largest)
        if self.name != "tensorwise":
            # The exponent alone: a power of two that is not above the scale.
            scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
        data = (wide * _spread(scale, block, matrix)).clamp(-largest, largest).to(dtype)
        return Rounded(data=data, scale=1 / scale, block=block, dtype=matrix.dtype)

    def _block(self, matrix: torch.Tensor, operand: Operand, along: int) -> tuple[int, int]:
        if self.name == "tensorwise":
            rows, columns = matrix.shape
            return max(rows, 1), max(columns, 1)
        if self.name == "blockwise" and operand == "weight":
            return 128, 128
        length = 32 if self.name == "mxfp8" else 128
        return (1, length) if along == 1 else (length, 1)


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
