"""Megatron-core's checkpoint format `torch_dist`: tensors in chunks, as torch.distributed.checkpoint keeps them.

    metadata.json     name of the format
    .metadata         a pickle: type, shape and chunks of every tensor, and each chunk's file and bytes in it
    __0_0.distcp ...  chunks one after the other, each an archive as torch.save makes it: a pickle and the values
    common.pt         a pickle of values that belong to no tensor; it is written, and never read

Of chunks only the requested rows are read, whatever their size. The pickle of `.metadata` is read by `unpickle`,
those of chunks by torch.load with `weights_only`. The names of tensors are in `models.megatron_names`.

torch's FileSystemReader loads `.metadata` without restrictions and whole chunks without their checksums; its FileSystemWriter
puts a path of the machine and a random id into `.metadata`.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mgrpo.checkpoint.boxes import covers, described
from mgrpo.checkpoint.folder import LocalFolder
from mgrpo.checkpoint.manifest import file_name
from mgrpo.checkpoint.shard import split
from mgrpo.model_io.hf_folder import Header
from mgrpo.model_io.unpickle import Forbidden, StoredStorage, record, unpickle
from mgrpo.models.hf_files.weight_files import COMMON, TORCH_DIST, TORCH_DIST_INDEX
from mgrpo.models.placement.boxes import Box, Shape

CHUNK_BYTES = 4 << 20
"""Most bytes of a chunk that we write, unless one row is larger. Megatron reads whole chunks, however little it needs."""
_PICKLE_BYTES = 1 << 20
"""Most bytes of an entry in a chunk's archive, without the values; its pickle describes one tensor."""
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The types that weights may have."""
_METADATA, _PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_INDEX_NAMES = (
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("megatron.core.dist_checkpointing.strategies.torch", name) for name in ("MCoreMetadata", "MCoreSavePlan")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
)
_DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
_IN_INDEX: dict[tuple[str, str], Any] = {
    **{(module, name): record(name) for module, name in _INDEX_NAMES},
    **{("torch", name): getattr(torch, name) for name in _DTYPE_NAMES},
}
"""The names that the pickle of `.metadata` may use: all of them are data."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and the bytes of its archive."""

    box: Box
    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, whose chunks cover each element once."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]
    """Sorted by their starts."""

    @cached_property
    def _starts(self) -> list[Shape]:
        return [chunk.box.start for chunk in self.chunks]

    @cached_property
    def _longest(self) -> Shape:
        """The longest extent of all chunks, along each dimension."""
        return tuple(map(max, zip(*(chunk.box.shape for chunk in self.chunks), strict=True)))

    def parts(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """Chunks that overlap a box, each with the common box."""
        earliest = tuple(start - longest + 1 for start, longest in zip(box.start, self._longest, strict=True))
        latest = tuple(start + length - 1 for start, length in zip(box.start, box.shape, strict=True))
        first, last = bisect.bisect_left(self._starts, earliest), bisect.bisect_right(self._starts, latest)
        for chunk in self.chunks[first:last]:
            if (common := chunk.box.intersect(box)) is not None:
                yield chunk, common


class TorchDistFolder:
    """The tensors of a folder in this format. Objects, of which Megatron-core keeps some, are not read.

    Raises:
        ValueError: it is damaged, in another format, or one of its pickles imports a name that weights do not need.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_format()
        index = path / TORCH_DIST_INDEX
        found = unpickle(index.read_bytes(), _IN_INDEX, str(index))
        try:
            read = _fields(found, "Metadata")
            items = read["state_dict_metadata"].items()
            self._described = {str(name): own for name, own in items if _kind(own) == "TensorStorageMetadata"}
            self._places: dict[str, dict[Shape, _Place]] = {}
            for key, value in read["storage_data"].items():
                place = _fields(key, "MetadataIndex")
                if place["fqn"] in self._described:
                    start = _size(place["offset"])
                    self._places.setdefault(place["fqn"], {})[start] = _fields(value, "_StorageInfo")
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as err:
            raise self._damaged(f"{TORCH_DIST_INDEX} is malformed: {type(err).__name__}: {err}") from None
        self._sizes: dict[str, int] = {}
        self._tensors: dict[str, StoredTensor] = {}
        self._starts: dict[Chunk, int] = {}

    @property
    def names(self) -> Set[str]:
        """Every tensor."""
        return self._described.keys()

    def tensor(self, name: str) -> StoredTensor:
        """A tensor, checked: its chunks cover it and are inside their files."""
        if name not in self._tensors:
            try:
                self._tensors[name] = self._tensor(name)
            except (KeyError, TypeError, AttributeError, IndexError, ValueError) as err:
                why = str(err) if type(err) is ValueError else f"{type(err).__name__}: {err}"
                raise self._damaged(f"{name} in {TORCH_DIST_INDEX}: {why}") from None
        return self._tensors[name]

    def read(self, box: Box) -> torch.Tensor:
        """The values of a box; all its dimensions but the last two are 1 long."""
        tensor = self.tensor(box.name)
        out = torch.empty(box.shape, dtype=tensor.dtype)
        for chunk, common in tensor.parts(box):
            out[common.within(box)].copy_(self._region(chunk, tensor.dtype, common))
        return out

    def check_sums(self, names: Iterable[str]) -> None:
        """Compare the values of these tensors with their checksums; ValueError when some have changed since they were written."""
        for name in names:
            tensor = self.tensor(name)
            for chunk in tensor.chunks:
                self._start(chunk, tensor.dtype)
                with self._window(chunk) as window, zipfile.ZipFile(window) as archive:
                    if archive.testzip():
                        raise self._damaged(f"{chunk.file}: {described(chunk.box)} has changed since it was written")

    def _check_format(self) -> None:
        file = self.path / TORCH_DIST
        try:
            found = json.loads(file.read_text())
            backend, version = found["sharded_backend"], found.get("sharded_backend_version", 1)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise self._damaged(f"{TORCH_DIST} is malformed: {type(err).__name__}: {err}") from None
        if (backend, version) != ("torch_dist", 1):
            raise ValueError(
                f"{file} says format {backend!r}, version {version!r}; only torch_dist, version 1, is read: load it with "
                "Megatron and save it in that format"
            )

    def _tensor(self, name: str) -> StoredTensor:
        stored, places = _fields(self._described[name], "TensorStorageMetadata"), self._places.get(name, {})
        dtype, shape = stored["properties"].state[0], _size(stored["size"])
        if dtype not in DTYPES:
            raise ValueError(f"it has type {dtype}; expected one of {', '.join(map(str, DTYPES))}")
        chunks = []
        for own in stored["chunks"]:
            start, sizes = (_size(_fields(own, "ChunkStorageMetadata")[key]) for key in ("offsets", "sizes"))
            if start not in places:
                raise ValueError(f"its chunk at {list(start)} is in no file")
            chunks.append(self._chunk(Box(name, start, sizes), places[start], dtype))
        if not _is_grid([(chunk.box.start, chunk.box.shape) for chunk in chunks], shape):
            covers((chunk.box for chunk in chunks), {name: shape})
        return StoredTensor(dtype, shape, tuple(sorted(chunks, key=lambda chunk: chunk.box.start)))

    def _chunk(self, box: Box, place: _Place, dtype: torch.dtype) -> Chunk:
        file, offset, num_bytes = file_name(place["relative_path"]), place["offset"], place["length"]
        if place.get("transform_descriptors"):
            raise ValueError(f"its chunks are stored as {place['transform_descriptors']}, which is not read")
        if not all(type(number) is int and number >= 0 for number in (offset, num_bytes)):
            raise ValueError(f"{described(box)} has {num_bytes!r} bytes from {offset!r} on")
        if file not in self._sizes:
            with contextlib.suppress(OSError):
                self._sizes[file] = (self.path / file).stat().st_size
        if file not in self._sizes:
            raise ValueError(f"{file} is missing")
        if offset + num_bytes > self._sizes[file]:
            raise ValueError(
                f"{file} ends after {self._sizes[file]:,} bytes, {described(box)} is in bytes {offset:,} to "
                f"{offset + num_bytes:,}"
            )
        if box.size * dtype.itemsize > num_bytes:
            raise ValueError(f"{described(box)} needs {box.size * dtype.itemsize:,} bytes, {num_bytes:,} are stored")
        return Chunk(box, file, offset, num_bytes)

    def _region(self, chunk: Chunk, dtype: torch.dtype, common: Box) -> torch.Tensor:
        """Part `common` of a chunk; the bytes from its first element to its last are read."""
        shape = chunk.box.shape
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        region = common.within(chunk.box)
        first = sum(own.start * stride for own, stride in zip(region, strides, strict=True))
        last = sum((own.stop - 1) * stride for own, stride in zip(region, strides, strict=True))
        values = torch.empty(last + 1 - first, dtype=dtype)
        with self._window(chunk) as window:
            window.seek(self._start(chunk, dtype) + first * dtype.itemsize)
            if window.readinto(values.view(torch.uint8).numpy().data) != values.nbytes:
                raise self._damaged(f"{chunk.file} ends in the middle of {described(chunk.box)}")
        return values.as_strided(common.shape, strides)

    def _start(self, chunk: Chunk, dtype: torch.dtype) -> int:
        """The place in a chunk's archive where its values begin."""
        if chunk not in self._starts:
            where = f"{self.path / chunk.file}, bytes {chunk.offset:,} to {chunk.offset + chunk.num_bytes:,}"
            with self._window(chunk) as window:
                try:
                    self._starts[chunk] = _start_of_values(window, chunk.box, dtype)
                except Exception as err:  # a damaged archive or pickle can raise anything
                    if imported := re.search(r"GLOBAL (\S+)", str(err)):
                        raise Forbidden(where, imported[1]) from None
                    # Not torch's message about pickles: it advises to load them without restrictions.
                    why = err if isinstance(err, ValueError | zipfile.BadZipFile | OSError) else type(err).__name__
                    raise ValueError(
                        f"{where}: it does not hold {described(chunk.box)} of type {dtype}: {why}"
                    ) from None
        return self._starts[chunk]

    def _window(self, chunk: Chunk) -> io.BufferedReader:
        # Unlike a raw file, it reads more than 2 GiB at once.
        return io.BufferedReader(_Window(self.path / chunk.file, chunk.offset, chunk.num_bytes))

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is damaged: {what}")


_Place = dict[str, Any]
"""Fields of a `_StorageInfo`."""


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, StoredStorage) else ""


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """Fields of a record that stands for a dataclass; ValueError for anything else."""
    if _kind(value) != kind or not isinstance(value.state, dict):
        raise ValueError(f"{value!r} in place of a {kind}")
    return value.state


def _size(value: Any) -> Shape:
    """The numbers of a torch.Size; ValueError for anything else."""
    numbers = value.args[0] if _kind(value) == "Size" and len(value.args) == 1 else None
    if not isinstance(numbers, tuple | list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r} in place of sizes")
    return tuple(numbers)


def _is_grid(boxes: Sequence[tuple[Shape, Shape]], whole: Shape) -> bool:
    """True if boxes (start, shape) cover a tensor once, cut along its first dimension, then each part along its second, ...

    The test is fast for many thousands, and true for boxes that Megatron and mgrpo write; others may also cover it.
    """
    if not whole:
        return len(boxes) == 1
    parts: dict[tuple[int, int], list[tuple[Shape, Shape]]] = {}
    for start, shape in boxes:
        if len(start) != len(whole) or len(shape) != len(whole):
            return False
        parts.setdefault((start[0], shape[0]), []).append((start[1:], shape[1:]))
    end = 0
    for first, length in sorted(parts):
        if first != end:
            return False
        end += length
    return end == whole[0] and all(_is_grid(part, whole[1:]) for part in parts.values())


class _Window(io.FileIO):
    """Some bytes of a file, as a raw file."""

    def __init__(self, path: Path, offset: int, num_bytes: int) -> None:
        super().__init__(path)
        self._offset, self._end = offset, offset + num_bytes
        self.seek(0)

    def tell(self) -> int:
        return super().tell() - self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        offset += {io.SEEK_SET: self._offset, io.SEEK_CUR: super().tell(), io.SEEK_END: self._end}[whence]
        if offset < self._offset:
            raise OSError(f"seek to {offset}, before {self._offset}")
        return super().seek(offset) - self._offset

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[: max(self._end - super().tell(), 0)]) or 0

    def read(self, size: int | None = -1) -> bytes:
        return io.RawIOBase.read(self, -1 if size is None else size)

    readall = io.RawIOBase.readall


def _start_of_values(window: io.BufferedReader, box: Box, dtype: torch.dtype) -> int:
    """The place of the values in an archive of torch.save; ValueError unless they are those of a box, row by row."""
    archive = zipfile.ZipFile(window)
    others = {entry.filename: entry for entry in archive.infolist()}
    if len(others) < len(archive.infolist()):
        raise ValueError("two of its entries have one name")
    stored = [others.pop(name) for name in list(others) if "/data/" in name]
    for name, entry in others.items():
        if entry.file_size > _PICKLE_BYTES:
            raise ValueError(f"{name} has {entry.file_size:,} bytes for one tensor")
        if name.endswith("/byteorder") and archive.read(name) != b"little":
            raise ValueError("numbers of another byte order")
    window.seek(0)
    tensor = torch.load(window, map_location="meta", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tensor.shape) != (dtype, box.shape):
        raise ValueError(f"its pickle says {str(tensor)[:200]}")
    if tensor.storage_offset() != 0 or not tensor.is_contiguous():
        raise ValueError(f"its values lie {tensor.storage_offset()} from the first, with strides {tensor.stride()}")
    start = tensor.untyped_storage()._checkpoint_offset
    if start is None or [(own.file_size, own.compress_type) for own in stored] != [(tensor.nbytes, zipfile.ZIP_STORED)]:
        raise ValueError("its values are not stored as torch.save does")
    if start != _values_of(window, stored[0].header_offset):
        raise ValueError("torch and zipfile find its values at different places")
    return start


def _values_of(window: io.BufferedReader, header: int) -> int:
    """The place of an entry's values in an archive, after its header."""
    window.seek(header)
    fixed = window.read(30)
    return header + len(fixed) + int.from_bytes(fixed[26:28], "little") + int.from_bytes(fixed[28:], "little")


def write_torch_dist(
    folder: Path,
    tensors: Mapping[str, Header],
    chunks: Sequence[tuple[Box, Callable[[], torch.Tensor]]],
    *,
    copies: Mapping[str, Sequence[str]],
    objects: Iterable[str],
    common: Mapping[str, Any],
    file_bytes: int,
) -> None:
    """Write a folder that Megatron-core loads, with one chunk in memory at a time.

    Args:
        chunks: boxes that cover the tensors, and a function for the values of each.
        copies: further names of tensors, under which the same bytes are found.
        objects: names of objects, each of which is None.
        common: contents of common.pt.
    """
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    def append(stream: BinaryIO, file: str, value: Any) -> _StorageInfo:
        start = stream.tell()
        torch.save(value, stream)
        return _StorageInfo(file, start, stream.tell() - start)

    places: dict[metadata.MetadataIndex, _StorageInfo] = {}
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    files = split(chunks, file_bytes, size=lambda chunk: chunk[0].size * tensors[chunk[0].name][0].itemsize)
    for number, own in enumerate(files):
        file = f"__{number}_0.distcp"
        with LocalFolder(folder).create(file) as stream:
            for box, values in own:
                place = append(stream, file, values())
                boxes[box.name].append(box)
                for name in (box.name, *copies.get(box.name, ())):
                    places[metadata.MetadataIndex(name, box.start)] = place
            if number == 0:
                nothing = append(stream, file, [None])
    described: dict[str, metadata.STORAGE_TYPES] = {}
    for name, (dtype, shape) in tensors.items():
        parts = [metadata.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box in boxes[name]]
        for known in (name, *copies.get(name, ())):
            described[known] = metadata.TensorStorageMetadata(
                metadata.TensorProperties(dtype=dtype), torch.Size(shape), parts
            )
    for name in objects:
        described[name] = metadata.BytesStorageMetadata()
        places[metadata.MetadataIndex(name)] = nothing
    index = metadata.Metadata(state_dict_metadata=described, storage_data=places)
    LocalFolder(folder).replace(TORCH_DIST_INDEX, pickle.dumps(index))
    with LocalFolder(folder).create(COMMON) as stream:
        torch.save(dict(common), stream)
    formats = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    formats |= {"common_backend": "torch", "common_backend_version": 1}
    LocalFolder(folder).replace(TORCH_DIST, json.dumps(formats).encode())
