"""Bytes on the simulated device, by kind, as storages come, change size and go."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass

import torch

ROUNDING = 512
"""The caching allocator hands out multiples of this."""


@dataclass(slots=True)
class _Block:
    nbytes: int
    kind: str


class Memory:
    """Bytes that are allocated now, by kind, and those at the peak."""

    def __init__(self) -> None:
        self.by_kind: Counter[str] = Counter()
        self.total = 0
        self.peak, self.at_peak = 0, dict[str, int]()
        self._blocks: dict[int, _Block] = {}

    def add(self, tensor: torch.Tensor, kind: str) -> None:
        """Count the tensor's storage, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            block = self._blocks[key] = _Block(0, kind)
            weakref.finalize(storage, self._free, key, block)
            self._set_size(block, storage.size())

    def rename(self, tensor: torch.Tensor, kind: str, *, only: frozenset[str] | None = None) -> None:
        """Count the tensor's storage as this kind, if it is of one of the kinds `only`."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block and (only is None or block.kind in only):
            self.by_kind[block.kind] -= block.nbytes
            self.by_kind[kind] += block.nbytes
            block.kind = kind

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Record the storage's new size."""
        if block := self._blocks.get(storage._cdata):
            self._set_size(block, storage.size())

    def forget_peak(self) -> None:
        """Start a new peak."""
        self.peak = 0

    def _set_size(self, block: _Block, nbytes: int) -> None:
        nbytes = -(-nbytes // ROUNDING) * ROUNDING
        self.by_kind[block.kind] += nbytes - block.nbytes
        self.total += nbytes - block.nbytes
        block.nbytes = nbytes
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, {kind: size for kind, size in self.by_kind.items() if size}

    def _free(self, key: int, block: _Block) -> None:
        if self._blocks.get(key) is block:
            del self._blocks[key]
        self._set_size(block, 0)
