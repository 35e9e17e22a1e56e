"""Block-wise fp8 of weights and activations: maxima, scales, values and back.

Not yet wired to an engine and not run on a GPU; `fp8_blocks` has the planning. A weight's blocks are 128 x 128, an activation's
1 x 128 (a token's 128 channels). With scale = max |v| / 448 a value is v / scale, rounded to e4m3fn (3 bits of mantissa, at most
448), so that |v - value * scale| <= max(|v| / 16, scale / 1024): half a step, or half the least number.

Parts of a block on several ranks are quantised to the bytes of the whole if all use the maximum over the parts. A block with a NaN
or an infinity becomes NaN throughout, on every rank that has a part: its maximum is infinite, which a maximum over ranks keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mgrpo.sync.fp8_blocks import BLOCK

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
WEIGHT = (BLOCK, BLOCK)
ACTIVATION = (1, BLOCK)

Sides = tuple[int, int]


def maxima(values: Tensor, *, start: Sides = (0, 0), block: Sides = WEIGHT) -> Tensor:
    """The largest magnitude of each block's part in a slice of a matrix.

    Args:
        values: `[rows, columns]` float, which begin at element `start` of the matrix.
    Returns:
        `[row blocks, column blocks]` float32, of the blocks that the slice has a part of; inf where a value is not finite.
    """
    above, before = start[0] % block[0], start[1] % block[1]
    below, behind = (-(first + n) % side for first, n, side in zip(start, values.shape, block, strict=True))
    whole = pad(values.float(), (before, behind, above, below))
    blocks = whole.view(whole.shape[0] // block[0], block[0], whole.shape[1] // block[1], block[1])
    return blocks.abs().amax(dim=(1, 3)).nan_to_num(nan=torch.inf, posinf=torch.inf)


def scales(largest: Tensor) -> Tensor:
    """float32 like `largest`, the maxima of whole blocks. A block of zeros has the least normal number."""
    return (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)


def quantised(values: Tensor, scale: Tensor, *, start: Sides = (0, 0), block: Sides = WEIGHT) -> Tensor:
    """`[rows, columns]` float8_e4m3fn of a slice that begins at element `start`; `scale` as `maxima` orders blocks."""
    return (values.float() / _spread(scale, values, start, block)).to(DTYPE)


def dequantised(values: Tensor, scale: Tensor, *, start: Sides = (0, 0), block: Sides = WEIGHT) -> Tensor:
    """`[rows, columns]` float32 of what `quantised` gave."""
    return values.float() * _spread(scale, values, start, block)


def rounded(values: Tensor, *, block: Sides = WEIGHT) -> Tensor:
    """What an engine would compute with in place of a matrix, or of `[..., channels]` activations: the same shape and dtype."""
    matrix = values.reshape(-1, values.shape[-1])
    scale = scales(maxima(matrix, block=block))
    back = dequantised(quantised(matrix, scale, block=block), scale, block=block)
    return back.to(values.dtype).view(values.shape)


def _spread(scale: Tensor, values: Tensor, start: Sides, block: Sides) -> Tensor:
    """`[rows, columns]`: the scale of each element."""
    for dim, (first, side) in enumerate(zip(start, block, strict=True)):
        place = first % side + torch.arange(values.shape[dim], device=scale.device)
        scale = scale.index_select(dim, place // side)
    return scale
