"""Reads safetensors files slice by slice, with little memory however much is read.

A file is mapped into memory, and every page that was touched counts towards this process until the file is closed. So
all files are closed whenever a certain amount has been read, and opened again when they are needed.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mgrpo.checkpoint.shard import DTYPES
from mgrpo.models.placement.boxes import Shape

MAPPED_BYTES = 16 << 20


class MappedFiles:
    """Mapped files that together take `MAPPED_BYTES` of memory, or as much as one read; ValueError names a damaged one."""

    def __init__(self) -> None:
        self._open: dict[Path, safe_open] = {}
        self._num_bytes = 0

    def names(self, path: Path) -> list[str]:
        """Tensors of a file."""
        return list(self._file(path).keys())

    def header(self, path: Path, name: str) -> tuple[torch.dtype, Shape]:
        """Type and shape of a tensor."""
        stored = self._slice(path, name)
        if stored.get_dtype() not in DTYPES:
            raise ValueError(f"{path}: {name} has type {stored.get_dtype()}; expected one of {', '.join(DTYPES)}")
        return DTYPES[stored.get_dtype()], tuple(stored.get_shape())

    def read(self, path: Path, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """A copy of a part of a tensor."""
        shape = self._slice(path, name).get_shape()
        # Whole rows are touched even where few of their columns are read.
        num_rows = region[0].stop - region[0].start if region else 1
        num_bytes = num_rows * math.prod(shape[1:]) * self.header(path, name)[0].itemsize
        if self._num_bytes + num_bytes > MAPPED_BYTES:
            self.close()
        self._num_bytes += num_bytes
        return self._slice(path, name)[region].clone()

    def close(self) -> None:
        """Close all files."""
        self._open.clear()
        self._num_bytes = 0

    def _slice(self, path: Path, name: str):
        try:
            return self._file(path).get_slice(name)
        except SafetensorError as err:
            raise ValueError(f"{path} has no tensor {name}: {err}") from err

    def _file(self, path: Path) -> safe_open:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as err:
                raise ValueError(f"{path} is not a complete safetensors file: {err}") from err
        return self._open[path]
