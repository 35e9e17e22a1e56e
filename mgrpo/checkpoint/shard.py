"""Files in the safetensors format, written and hashed in one pass.

The safetensors package, which reads them slice by slice, would hold a whole file in memory to write it, and the file
would have to be read again for its checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import torch

from mgrpo.checkpoint.boxes import described
from mgrpo.checkpoint.manifest import FileRecord, PieceRecord
from mgrpo.models.placement.boxes import Box, Shape

FILE_BYTES = 4 << 30
"""Most bytes of tensors in a file, unless one tensor alone is larger."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of the types that may be stored."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK_BYTES = 16 << 20
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One box of one tensor, and its values on this rank."""

    kind: str
    """Kind of the values: "master", "exp_avg", "exp_avg_sq", "reference"."""
    box: Box
    tensor: torch.Tensor
    """Any dtype and device, contiguous or a view, in the box's shape."""

    def __post_init__(self) -> None:
        assert tuple(self.tensor.shape) == self.box.shape, (self.kind, self.box, tuple(self.tensor.shape))


class Hashed:
    """A stream that records the size and the checksum of written bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self._digest, self._num_bytes = hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        # In chunks, each hashed while it is in the cache; a remote stream copies at most one.
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            self._digest.update(chunk)
            self.stream.write(chunk)
        self._num_bytes += len(view)

    def record(self) -> FileRecord:
        return FileRecord(num_bytes=self._num_bytes, sha256=self._digest.hexdigest())


def split(items: Iterable[Item], file_bytes: int, *, size: Callable[[Item], int]) -> list[list[Item]]:
    """The items of each file: in order, as many as fit into `file_bytes`, at least one."""
    files: list[list[Item]] = []
    room = 0
    for item in items:
        if size(item) > room or not files:
            files.append([])
            room = file_bytes
        files[-1].append(item)
        room -= size(item)
    return files


def write_shard(stream: BinaryIO, file: str, parts: Sequence[Part]) -> tuple[FileRecord, list[PieceRecord]]:
    """Write `parts` as one file called `file`; its records for the manifest."""
    tensors, records = {}, []
    for part in parts:
        if part.tensor.dtype not in CODES:
            raise ValueError(f"{part.kind} {part.box.name} has type {part.tensor.dtype}, which safetensors cannot hold")
        key, code = f"{part.kind} {described(part.box)}", CODES[part.tensor.dtype]
        tensors[key] = part.tensor
        records.append(PieceRecord(kind=part.kind, dtype=code, box=part.box, file=file, key=key))
    assert len(tensors) == len(parts), f"{file} would hold a part twice"
    headers = {key: (tensor.dtype, part.box.shape) for (key, tensor), part in zip(tensors.items(), parts, strict=True)}
    return write_tensors(stream, headers, lambda key: [tensors[key]]), records


def write_tensors(
    stream: BinaryIO,
    headers: Mapping[str, tuple[torch.dtype, Shape]],
    values: Callable[[str], Iterable[torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write a file of tensors with these names, types and shapes.

    Args:
        headers: of types in `CODES`.
        values: gives a tensor in blocks of rows, each of which is written before the next is requested.
    """
    # Widest type first, so that each tensor begins at a multiple of its type's size, which readers rely on.
    names = sorted(headers, key=lambda name: -headers[name][0].itemsize)
    offset = 0
    header: dict[str, dict[str, Any]] = {"__metadata__": dict(metadata)} if metadata else {}
    for name in names:
        dtype, shape = headers[name]
        end = offset + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    hashed = Hashed(stream)
    hashed.write(struct.pack("<Q", len(text)) + text)
    for name in names:
        for block in values(name):
            assert block.dtype == headers[name][0], (name, block.dtype, headers[name])
            hashed.write(block.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
    found = hashed.record()
    assert found.num_bytes == 8 + len(text) + offset, (
        f"{found.num_bytes - 8 - len(text)} bytes of values instead of {offset}"
    )
    return found
