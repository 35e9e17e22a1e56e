"""Digest of a tensor's bytes, equal in all processes that hold the same ones; shards add it up without a gather.

The digest of a set of elements is the sum, modulo 2^64, of (bits of the element) x (an odd pseudo-random number made from
the element's position in the whole Hugging Face tensor). It is additive over any cut into boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from mgrpo.models.placement.boxes import Box, Shape

_CHUNK = 1 << 20
# 2^64 / golden ratio as int64, the multiplier of Fibonacci hashing (Knuth, TAOCP 3, 6.4).
_GOLDEN = -7046029254386353131
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(held: Iterable[tuple[Box, torch.Tensor]], shapes: Mapping[str, Shape]) -> torch.Tensor:
    """`[tensors]` int64 on the CPU: for each tensor of `shapes` the digest of its slices among `held`."""
    column = {name: number for number, name in enumerate(shapes)}
    columns, sums = [], []
    for box, values in held:
        columns.append(column[box.name])
        sums.append(digest(box, values, shapes[box.name]))
    table = torch.zeros(len(shapes), dtype=torch.int64)
    if sums:
        # One transfer from the device for all of them.
        table.index_add_(0, torch.tensor(columns), torch.stack(sums).cpu())
    return table


def digest(box: Box, values: torch.Tensor, tensor_shape: Shape) -> torch.Tensor:
    """Digest of `values`, which are the slice `box` of a tensor of `tensor_shape`: int64, on the device of `values`."""
    strides = [math.prod(tensor_shape[dim + 1 :]) for dim in range(len(tensor_shape))]
    offset = sum(first * stride for first, stride in zip(box.start, strides, strict=True))
    return _sum(values, strides, offset)


def _sum(values: torch.Tensor, strides: Sequence[int], offset: int) -> torch.Tensor:
    """The sum over elements at `offset + index * strides`, counted in the whole tensor; copies of `values` stay small."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows, width = values.shape[0], math.prod(values.shape[1:])
    if values.dim() > 1 and width > _CHUNK:
        for row in range(rows):
            total += _sum(values[row], strides[1:], offset + row * strides[0])
        return total
    places = torch.full((), offset, dtype=torch.int64, device=values.device)
    for length, stride in zip(values.shape[1:], strides[1:], strict=True):
        places = places[..., None] + torch.arange(length, device=values.device) * stride
    step = max(_CHUNK // max(width, 1), 1)
    for first in range(0, rows, step):
        part = values[first : first + step].contiguous()
        own = torch.arange(first, first + part.shape[0], device=values.device) * strides[0]
        mixed = (own.view(-1, *[1] * places.dim()) + places) * _GOLDEN
        odd = (mixed ^ (mixed >> 29)) | 1
        total += (part.view(_BITS[part.element_size()]).long() * odd).sum()
    return total
