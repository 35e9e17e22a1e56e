"""Copies of a rank's tensors in host memory, which training waits for and nothing after it changes.

From a GPU they go into page-locked memory, to which it copies at the rate of its bus, and which the next save uses again: to make
such memory takes longer than to fill it. torch takes it in powers of two, so tensors share blocks of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mgrpo.checkpoint.shard import Part

BLOCK_BYTES = 256 << 20
"""Least size of a block, unless less remains; a power of two, as all of them are."""
_ALIGNMENT = 64


class HostCopies:
    """Host copies of one rank. The result of `take` is valid until the next call."""

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor] | None = None,
        *,
        synchronize: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            allocate: makes blocks of so many bytes, `locked` for tensors on a GPU, that are kept; None: every copy is new.
            synchronize: waits until the device has made the copies.
        """
        self._allocate, self._synchronize = allocate, synchronize
        self._sizes: list[int] = []
        self._blocks: list[torch.Tensor] = []
        self._places: list[tuple[int, int]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that are kept for the next copies."""
        return sum(len(block) for block in self._blocks)

    @torch.no_grad()
    def take(self, parts: Sequence[Part]) -> list[Part]:
        """The same parts in host memory, copied when this returns."""
        if self._allocate is None:
            return [replace(part, tensor=part.tensor.detach().to("cpu", copy=True)) for part in parts]
        sizes = [part.tensor.nbytes for part in parts]
        if sizes != self._sizes:
            self._blocks = []  # before the new ones are made
            self._places, lengths = pack(sizes)
            self._blocks = [self._allocate(length) for length in lengths]
            self._sizes = sizes
        copies = []
        for part, (block, start) in zip(parts, self._places, strict=True):
            room = self._blocks[block][start : start + part.tensor.nbytes]
            copy = room.view(part.tensor.dtype).view(part.tensor.shape)
            copy.copy_(part.tensor, non_blocking=True)
            copies.append(replace(part, tensor=copy))
        self._synchronize()
        return copies


def locked(num_bytes: int) -> torch.Tensor:
    """A block of page-locked memory, `[num_bytes]` uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def pack(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Block and first byte of each of `sizes` bytes, and the lengths of the blocks, which are powers of two."""
    lengths: list[int] = []
    used: list[int] = []
    places = [(0, 0)] * len(sizes)
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    remaining = sum(padded)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = padded[index]
        block = next((b for b, length in enumerate(lengths) if used[b] + size <= length), len(lengths))
        if block == len(lengths):
            lengths.append(_power_of_two(max(size, min(remaining, BLOCK_BYTES))))
            used.append(0)
        places[index] = block, used[block]
        used[block] += size
        remaining -= size
    return places, lengths


def _power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
