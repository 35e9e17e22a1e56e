"""The JSON beside the tensors: what a rank says it wrote (index), and what a whole checkpoint is made of (manifest).

Both are read as the words of a stranger: every value is checked, and no file name leaves the checkpoint's folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mgrpo.checkpoint.boxes import covers
from mgrpo.checkpoint.folder import MANIFEST
from mgrpo.models.table import Box, Shape

VERSION = 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what was written; `previous` is the newest complete one before it, if there is any."""

    def __init__(self, message: str, *, previous: str | None = None) -> None:
        self.previous = previous
        super().__init__(f"{message}; resume from the one before it: --resume {previous}" if previous else message)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and checksum of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRecord:
    """Where one box of a tensor lies."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """A piece, and of what."""

    kind: str
    dtype: str
    piece: PieceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor of one kind, from the pieces that cover it."""

    dtype: str
    shape: Shape
    pieces: tuple[PieceRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What one rank wrote in one attempt to save, or why it could not."""

    step: int
    rank: int
    world_size: int
    attempt: str
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    parts: tuple[PartRecord, ...] = ()
    error: str | None = None

    def to_json(self) -> bytes:
        files = {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in self.files.items()}
        parts = [[part.kind, part.piece.box.name, part.dtype, *_piece(part.piece)] for part in self.parts]
        head = {"step": self.step, "rank": self.rank, "world_size": self.world_size, "attempt": self.attempt}
        return json.dumps({**head, "error": self.error, "files": files, "parts": parts}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Index:
        """ValueError for anything that `to_json` cannot have made."""
        data = _load(text, "the index")
        try:
            return cls(
                step=_count(data["step"]),
                rank=_count(data["rank"]),
                world_size=_count(data["world_size"]),
                attempt=check_attempt(data["attempt"]),
                files=_files(data["files"]),
                parts=tuple(
                    PartRecord(kind=_text(kind), dtype=_text(dtype), piece=_read_piece(name, piece))
                    for kind, name, dtype, *piece in data["parts"]
                ),
                error=None if data["error"] is None else _text(data["error"]),
            )
        except (KeyError, TypeError, AttributeError) as err:
            raise ValueError(f"the index is malformed: {err!r}") from None


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
    """By kind and name."""

    def to_json(self) -> bytes:
        files = {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in self.files.items()}
        tensors = {
            kind: {
                name: {"dtype": own.dtype, "shape": own.shape, "pieces": [_piece(piece) for piece in own.pieces]}
                for name, own in by_name.items()
            }
            for kind, by_name in self.tensors.items()
        }
        head = {"version": VERSION, "step": self.step, "world_size": self.world_size, "attempt": self.attempt}
        return json.dumps({**head, "state": self.state, "files": files, "tensors": tensors}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """ValueError for another version, and for anything that `to_json` cannot have made."""
        data = _load(text, MANIFEST)
        if data.get("version") != VERSION:
            raise ValueError(f"{MANIFEST} has version {data.get('version')!r}, this mgrpo reads {VERSION}")
        try:
            made = cls(
                step=_count(data["step"]),
                world_size=_count(data["world_size"]),
                attempt=check_attempt(data["attempt"]),
                state=_file_name(data["state"]),
                files=_files(data["files"]),
                tensors={
                    kind: {name: _read_tensor(name, own) for name, own in by_name.items()}
                    for kind, by_name in data["tensors"].items()
                },
            )
        except (KeyError, TypeError, AttributeError) as err:
            raise ValueError(f"{MANIFEST} is malformed: {err!r}") from None
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


def merge(
    indexes: Iterable[Index],
    *,
    state: tuple[str, FileRecord],
    full_shapes: Mapping[str, Mapping[str, Shape]],
) -> Manifest:
    """The manifest of what all ranks wrote; ValueError when it is not exactly `full_shapes`, given by kind and name."""
    indexes = list(indexes)
    files = {state[0]: state[1]}
    found: dict[str, dict[str, list[PartRecord]]] = {
        kind: {name: [] for name in shapes} for kind, shapes in full_shapes.items()
    }
    for index in indexes:
        files.update(index.files)
        for part in index.parts:
            name = part.piece.box.name
            if name not in found.get(part.kind, ()):
                raise ValueError(f"rank {index.rank} wrote {part.kind} {name}, which is not expected")
            found[part.kind][name].append(part)
    tensors: dict[str, dict[str, TensorRecord]] = {}
    for kind, by_name in found.items():
        tensors[kind] = {}
        for name, parts in by_name.items():
            dtypes = sorted({part.dtype for part in parts})
            if len(dtypes) > 1:
                raise ValueError(f"{kind} {name} was written as {' and '.join(dtypes)}")
            tensors[kind][name] = TensorRecord(
                dtype=dtypes[0] if dtypes else "",
                shape=tuple(full_shapes[kind][name]),
                pieces=tuple(sorted((part.piece for part in parts), key=lambda piece: piece.box.start)),
            )
    first = indexes[0]
    made = Manifest(
        step=first.step,
        world_size=first.world_size,
        attempt=first.attempt,
        state=state[0],
        files=dict(sorted(files.items())),
        tensors=tensors,
    )
    made.check()
    return made


def check_attempt(attempt: object) -> str:
    """`attempt`, which becomes part of file names."""
    if not isinstance(attempt, str) or not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"attempt {attempt!r} must be 1 to 40 letters, digits, underscores or dashes")
    return attempt


def _load(text: bytes, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ValueError(f"{what} is no JSON: {err}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{what} is no JSON object")
    return data


def _piece(piece: PieceRecord) -> list[object]:
    return [piece.box.start, piece.box.shape, piece.file, piece.key]


def _read_piece(name: object, piece: Any) -> PieceRecord:
    start, shape, file, key = piece
    box = Box(_text(name), _shape(start), _shape(shape))
    if len(box.start) != len(box.shape):
        raise ValueError(f"a piece of {name} starts at {start} and has shape {shape}")
    return PieceRecord(box=box, file=_file_name(file), key=_text(key))


def _read_tensor(name: str, data: Any) -> TensorRecord:
    return TensorRecord(
        dtype=_text(data["dtype"]),
        shape=_shape(data["shape"]),
        pieces=tuple(_read_piece(name, piece) for piece in data["pieces"]),
    )


def _files(data: Any) -> dict[str, FileRecord]:
    found = {}
    for name, file in data.items():
        if not _SHA256.fullmatch(_text(file["sha256"])):
            raise ValueError(f"{name} has the checksum {file['sha256']!r}")
        found[_file_name(name)] = FileRecord(num_bytes=_count(file["bytes"]), sha256=file["sha256"])
    return found


def _file_name(name: object) -> str:
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a file of this folder")
    return name


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
