"""Megatron-core's checkpoint format `torch_dist`: tensors in chunks, as torch.distributed.checkpoint keeps them.

    metadata.json     which format it is
    .metadata         a pickle: type, shape and chunks of every tensor, and in which bytes of which file each chunk is
    __0_0.distcp ...  chunks one after the other, each an archive as torch.save makes it: a pickle and the values
    common.pt         a pickle of what belongs to no tensor; it is written, and never read

Of chunks only the rows that are asked for are read, whatever their size. All pickles are read by `unpickle`. Which names
tensors have is left to `models.megatron_names`.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import json
import math
import pickle
import zipfile
import zlib
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
from mgrpo.model_io.unpickle import StoredStorage, record, unpickle
from mgrpo.models.hf_files.weight_files import COMMON, TORCH_DIST, TORCH_DIST_INDEX
from mgrpo.models.placement.boxes import Box, Shape

CHUNK_BYTES = 4 << 20
"""Most bytes of a chunk that we write, unless one row is larger. Megatron reads whole chunks, however little it needs."""
_PICKLE_BYTES = 1 << 20
"""Most bytes of the pickle in a chunk's archive; it describes one tensor."""
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}
"""The types that weights may have, by torch's names of their storage."""
DTYPES = tuple(_STORAGES.values())
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
_IN_CHUNK: dict[tuple[str, str], Any] = {
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("torch._utils", "_rebuild_tensor_v2"): record("_rebuild_tensor_v2"),
    ("collections", "OrderedDict"): record("OrderedDict"),
}
"""The names that the pickle of a chunk may use."""


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
    """In the order of where they start."""

    @cached_property
    def _starts(self) -> list[Shape]:
        return [chunk.box.start for chunk in self.chunks]

    @cached_property
    def _longest(self) -> Shape:
        """The longest extent of all chunks, along each dimension."""
        return tuple(map(max, zip(*(chunk.box.shape for chunk in self.chunks), strict=True)))

    def parts(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """The chunks that hold some of a box, each with what it holds."""
        earliest = tuple(start - longest + 1 for start, longest in zip(box.start, self._longest, strict=True))
        latest = tuple(start + length - 1 for start, length in zip(box.start, box.shape, strict=True))
        first, last = bisect.bisect_left(self._starts, earliest), bisect.bisect_right(self._starts, latest)
        for chunk in self.chunks[first:last]:
            if (common := chunk.box.intersect(box)) is not None:
                yield chunk, common


@dataclass(frozen=True, slots=True)
class _Values:
    """The place in its file where a chunk's values begin, and what its archive says of them."""

    start: int
    num_bytes: int
    checksum: int
    """CRC-32."""


class TorchDistFolder:
    """The tensors of a folder in this format. Objects, of which Megatron-core keeps some, are not read.

    Raises:
        ValueError: it is damaged, in another format, or one of its pickles names what weights do not need.
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
        self._values: dict[Chunk, _Values] = {}

    @property
    def names(self) -> Set[str]:
        """Every tensor."""
        return self._described.keys()

    def tensor(self, name: str) -> StoredTensor:
        """A tensor, once it is known that its chunks cover it and lie inside their files."""
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
            out[common.within(box)].copy_(self._rows(chunk, tensor.dtype, common))
        return out

    def check_sums(self, names: Iterable[str]) -> None:
        """Compare the values of these tensors with their checksums; ValueError when some have changed since they were written."""
        for name in names:
            tensor = self.tensor(name)
            for chunk in tensor.chunks:
                values, found = self._archive(chunk, tensor.dtype), 0
                with open(self.path / chunk.file, "rb") as file:
                    file.seek(values.start)
                    for done in range(0, values.num_bytes, CHUNK_BYTES):
                        found = zlib.crc32(file.read(min(CHUNK_BYTES, values.num_bytes - done)), found)
                if found != values.checksum:
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

    def _rows(self, chunk: Chunk, dtype: torch.dtype, common: Box) -> torch.Tensor:
        """The part `common` of a chunk; whole rows are read."""
        dims = [dim for dim in zip(chunk.box.shape, common.within(chunk.box), strict=True) if dim[0] > 1]
        dims = [(1, slice(0, 1))] * (2 - len(dims)) + dims
        *leading, rows, width = (length for length, _ in dims)
        *places, own_rows, columns = (region for _, region in dims)
        assert all(place.stop == place.start + 1 for place in places), common
        matrix = 0
        for place, length in zip(places, leading, strict=True):
            matrix = matrix * length + place.start
        values = torch.empty(own_rows.stop - own_rows.start, width, dtype=dtype)
        with open(self.path / chunk.file, "rb") as file:
            first = (matrix * rows + own_rows.start) * width * dtype.itemsize
            file.seek(self._archive(chunk, dtype).start + first)
            if file.readinto(values.view(torch.uint8).numpy().data) != values.nbytes:
                raise self._damaged(f"{chunk.file} ends in the middle of {described(chunk.box)}")
        return values[:, columns].reshape(common.shape)

    def _archive(self, chunk: Chunk, dtype: torch.dtype) -> _Values:
        """The place of the values of a chunk, whose archive must hold just such a tensor."""
        if chunk not in self._values:
            where = f"{self.path / chunk.file}, bytes {chunk.offset:,} to {chunk.offset + chunk.num_bytes:,}"
            with open(self.path / chunk.file, "rb") as file:
                try:
                    self._values[chunk] = _open_archive(
                        _Window(file, chunk.offset, chunk.num_bytes), where, chunk, dtype
                    )
                except (zipfile.BadZipFile, KeyError, NotImplementedError, OSError, RuntimeError) as err:
                    raise ValueError(f"{where}: no complete archive of a tensor ({err})") from None
        return self._values[chunk]

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
    """Whether boxes (start, shape) cover a tensor once, cut along its first dimension, then each part along its second, ...

    That is quick to see of many thousands, and true of what Megatron and we write; others may cover it as well.
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


class _Window(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, num_bytes: int) -> None:
        self._file, self._offset, self._num_bytes, self._at = file, offset, num_bytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        if start + offset < 0:
            raise OSError(f"seek to {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        data = self._file.read(max(min(len(buffer), self._num_bytes - self._at), 0))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _open_archive(window: _Window, where: str, chunk: Chunk, dtype: torch.dtype) -> _Values:
    """The place in the file of the values in an archive of torch.save; ValueError unless they are the chunk's."""
    archive = zipfile.ZipFile(window)
    pickles = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"{where}: {len(pickles)} tensors in one archive")
    folder = pickles[0].filename.removesuffix("data.pkl")
    if pickles[0].file_size > _PICKLE_BYTES:
        raise ValueError(f"{where}: a pickle of {pickles[0].file_size:,} bytes for one tensor")
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{where}: {entry.filename} is compressed, which torch.save never does")
    if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
        raise ValueError(f"{where}: numbers of another byte order")
    tensor = unpickle(archive.read(pickles[0]), _IN_CHUNK, where, persistent=lambda reference: reference)
    problem = f"{where}: it does not hold {described(chunk.box)} of type {dtype}"
    if _kind(tensor) != "_rebuild_tensor_v2" or len(tensor.args) < 4:
        raise ValueError(problem)
    storage, skipped, shape, strides = tensor.args[:4]
    if not (isinstance(storage, tuple) and len(storage) == 5 and storage[0] == "storage" and storage[1] is dtype):
        raise ValueError(problem)
    if shape != chunk.box.shape or skipped != 0 or not _is_contiguous(shape, strides):
        raise ValueError(f"{problem} row by row, but shape {shape} with strides {strides}")
    entry = archive.getinfo(f"{folder}data/{storage[2]}")
    if chunk.box.size * dtype.itemsize != entry.file_size:
        raise ValueError(f"{problem}, which is not {entry.file_size:,} bytes")
    start = entry.header_offset + _local_header(window, entry.header_offset)
    if start + entry.file_size > chunk.num_bytes:
        raise ValueError(f"{where}: {entry.filename} ends after the archive")
    return _Values(chunk.offset + start, entry.file_size, entry.CRC)


def _local_header(window: _Window, start: int) -> int:
    """Bytes of the header before the values of an entry of an archive."""
    window.seek(start)
    header = window.read(30) or b""
    if len(header) != 30 or header[:4] != b"PK\3\4":
        raise zipfile.BadZipFile("an entry has no header")
    return 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _is_contiguous(shape: Shape, strides: Any) -> bool:
    """Whether elements with these strides lie row by row."""
    if not isinstance(strides, tuple) or len(strides) != len(shape):
        return False
    lengths = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return all(
        length == 1 or stride == expected for length, stride, expected in zip(shape, strides, lengths, strict=True)
    )


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
        chunks: boxes that cover the tensors, and what gives the values of each.
        copies: further names of tensors, under which the same bytes are found.
        objects: names of objects, each of which is None.
        common: what common.pt says.
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
