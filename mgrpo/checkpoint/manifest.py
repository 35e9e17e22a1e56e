"""The JSON beside the tensors: a rank's files (index), and the contents of a whole checkpoint (manifest).

Both are untrusted input. Checksums, the manifest's own among them, detect accidental changes; anyone can recompute
them, so every value is checked as well, and no file name leaves the checkpoint's folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mgrpo.checkpoint.boxes import covers
from mgrpo.checkpoint.folder import MANIFEST
from mgrpo.models.placement.boxes import Box, Shape

VERSION = 2
"""The version that is written; version 1 has no checksum of the manifest itself."""
READABLE = (1, 2)
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
Record = TypeVar("Record")


class DamagedCheckpoint(ValueError):
    """A checkpoint that has changed since it was written.

    Args:
        message: its name and the difference.
        previous: the newest complete one before it, if any.
    """

    def __init__(self, message: str, *, previous: str | None = None) -> None:
        self.reason, self.previous = message, previous
        remedy = f"; resume from the newest one that is not, --resume intact, or from one by name: --resume {previous}"
        super().__init__(f"{message}{remedy}" if previous else message)


class OtherVersion(ValueError):
    """A checkpoint in a format that this mgrpo does not read. Nothing is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and checksum of one file."""

    num_bytes: int
    sha256: str

    def as_json(self) -> dict[str, object]:
        """JSON form for `from_json`."""
        return {"bytes": self.num_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, data: Any) -> FileRecord:
        """Read a size and a checksum; ValueError for anything else."""
        if not _SHA256.fullmatch(_text(data["sha256"])):
            raise ValueError(f"{data['sha256']!r} must be a SHA-256 checksum in hexadecimal digits")
        return cls(num_bytes=_count(data["bytes"]), sha256=data["sha256"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRecord:
    """The place of one box of a tensor of one kind."""

    kind: str
    dtype: str
    box: Box
    file: str
    key: str

    @property
    def place(self) -> list[object]:
        """All but the tensor, as `read` takes it."""
        return [self.box.start, self.box.shape, self.file, self.key]

    @classmethod
    def read(cls, kind: object, name: object, dtype: object, place: Any) -> PieceRecord:
        """Read a box in a file of the checkpoint's folder; ValueError for anything else."""
        start, shape, file, key = place
        box = Box(_text(name), _shape(start), _shape(shape))
        if len(box.start) != len(box.shape):
            raise ValueError(f"a piece of {name} starts at {start} and has shape {shape}")
        return cls(kind=_text(kind), dtype=_text(dtype), box=box, file=file_name(file), key=_text(key))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor of one kind, from the pieces that cover it."""

    dtype: str
    shape: Shape
    pieces: tuple[PieceRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """One rank's files in one attempt to save, or the reason of its failure."""

    step: int
    rank: int
    world_size: int
    attempt: str
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    pieces: tuple[PieceRecord, ...] = ()
    error: str | None = None

    def to_json(self) -> bytes:
        head = {"step": self.step, "rank": self.rank, "world_size": self.world_size, "attempt": self.attempt}
        files = {name: file.as_json() for name, file in self.files.items()}
        pieces = [[piece.kind, piece.box.name, piece.dtype, *piece.place] for piece in self.pieces]
        return json.dumps({**head, "error": self.error, "files": files, "pieces": pieces}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Index:
        """Read an index; ValueError for anything that `to_json` cannot have made."""

        def read(data: dict[str, Any]) -> Index:
            return cls(
                step=_count(data["step"]),
                rank=_count(data["rank"]),
                world_size=_count(data["world_size"]),
                attempt=check_attempt(data["attempt"]),
                files=_files(data["files"]),
                pieces=tuple(
                    PieceRecord.read(kind, name, dtype, place) for kind, name, dtype, *place in data["pieces"]
                ),
                error=None if data["error"] is None else _text(data["error"]),
            )

        return _parsed(text, "the index", read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint."""

    step: int
    world_size: int
    attempt: str
    state: str
    """The file of the trainer's own state."""
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, Mapping[str, TensorRecord]]
    """Tensors by kind and name."""

    def to_json(self) -> bytes:
        head = {"version": VERSION, "step": self.step, "world_size": self.world_size, "attempt": self.attempt}
        files = {name: file.as_json() for name, file in self.files.items()}
        tensors = {
            kind: {
                name: {"dtype": own.dtype, "shape": own.shape, "pieces": [piece.place for piece in own.pieces]}
                for name, own in by_name.items()
            }
            for kind, by_name in self.tensors.items()
        }
        return signed({**head, "state": self.state, "files": files, "tensors": tensors})

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read a manifest: OtherVersion for another mgrpo's version, and ValueError for anything that `to_json` cannot have made."""

        def read(data: dict[str, Any]) -> Manifest:
            version = _count(data["version"])
            if version not in READABLE:
                raise OtherVersion(
                    f"{MANIFEST} has version {version}, this mgrpo reads {' and '.join(map(str, READABLE))}"
                )
            if version > 1 and data.pop("sha256") != _checksum(data):
                raise ValueError(f"{MANIFEST} has changed since it was written, its checksum differs")
            return cls(
                step=_count(data["step"]),
                world_size=_count(data["world_size"]),
                attempt=check_attempt(data["attempt"]),
                state=file_name(data["state"]),
                files=_files(data["files"]),
                tensors={
                    kind: {name: _tensor(kind, name, own) for name, own in by_name.items()}
                    for kind, by_name in data["tensors"].items()
                },
            )

        made = _parsed(text, MANIFEST, read)
        made.check()
        return made

    def check(self) -> None:
        """Every tensor is covered exactly once, by files that are listed; else ValueError."""
        for kind, by_name in self.tensors.items():
            boxes = [piece.box for own in by_name.values() for piece in own.pieces]
            try:
                covers(boxes, {name: own.shape for name, own in by_name.items()})
            except ValueError as err:
                raise ValueError(f"{kind} {err}") from None
        pieces = (piece for by_name in self.tensors.values() for own in by_name.values() for piece in own.pieces)
        unknown = {self.state, *(piece.file for piece in pieces)} - self.files.keys()
        if unknown:
            raise ValueError(f"{MANIFEST} has no size and checksum of {min(unknown)}")


def signed(data: Mapping[str, Any]) -> bytes:
    """The text of a manifest that holds `data` and their checksum."""
    return json.dumps({**data, "sha256": _checksum(data)}).encode()


def _checksum(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def merge(
    indexes: Iterable[Index],
    *,
    state: tuple[str, FileRecord],
    full_shapes: Mapping[str, Mapping[str, Shape]],
) -> Manifest:
    """Manifest of all ranks' files; ValueError when their tensors are not exactly `full_shapes`, given by kind and name."""
    first, *others = indexes
    files = {state[0]: state[1]}
    pieces: dict[tuple[str, str], list[PieceRecord]] = {}
    for index in (first, *others):
        files.update(index.files)
        for piece in index.pieces:
            if piece.box.name not in full_shapes.get(piece.kind, ()):
                raise ValueError(f"rank {index.rank} wrote {piece.kind} {piece.box.name}, which is not expected")
            pieces.setdefault((piece.kind, piece.box.name), []).append(piece)
    made = Manifest(
        step=first.step,
        world_size=first.world_size,
        attempt=first.attempt,
        state=state[0],
        files=dict(sorted(files.items())),
        tensors={
            kind: {name: _merged(shape, pieces.get((kind, name), [])) for name, shape in shapes.items()}
            for kind, shapes in full_shapes.items()
        },
    )
    made.check()
    return made


def _merged(shape: Shape, pieces: list[PieceRecord]) -> TensorRecord:
    dtypes = sorted({piece.dtype for piece in pieces})
    if len(dtypes) > 1:
        raise ValueError(f"{pieces[0].kind} {pieces[0].box.name} was written as {' and '.join(dtypes)}")
    ordered = sorted(pieces, key=lambda piece: piece.box.start)
    return TensorRecord(dtype=dtypes[0] if dtypes else "", shape=tuple(shape), pieces=tuple(ordered))


def check_attempt(attempt: object) -> str:
    """`attempt`, which becomes part of file names; else ValueError."""
    if not isinstance(attempt, str) or not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"attempt {attempt!r} must be 1 to 40 letters, digits, underscores or dashes")
    return attempt


def file_name(name: object) -> str:
    """`name`, if it is that of a file directly in the folder; else ValueError."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file in this folder")
    return name


def _parsed(text: bytes, what: str, read: Callable[[dict[str, Any]], Record]) -> Record:
    """The record that `read` makes of JSON; ValueError if anything is missing or of another type."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ValueError(f"{what} is not JSON: {err}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{what} is not a JSON object")
    try:
        return read(data)
    except (KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"{what} is malformed: {err!r}") from None


def _tensor(kind: str, name: str, data: Any) -> TensorRecord:
    pieces = tuple(PieceRecord.read(kind, name, data["dtype"], place) for place in data["pieces"])
    return TensorRecord(dtype=_text(data["dtype"]), shape=_shape(data["shape"]), pieces=pieces)


def _files(data: Any) -> dict[str, FileRecord]:
    return {file_name(name): FileRecord.from_json(file) for name, file in data.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} must be text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} must be a whole number, at least 0")
    return value


def _shape(value: object) -> Shape:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} must be a list of lengths")
    return tuple(_count(length) for length in value)
