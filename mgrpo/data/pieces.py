"""Large files in pieces that can be checked apart from each other: JSONL by bytes, parquet by row groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PIECE_BYTES = 8 * 2**20
_PIECE_ROWS = 32_768
_BATCH_ROWS = 2048

Piece = dict[str, Any]


def file_digest(path: Path) -> str:
    """A hash of a file's bytes."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_PIECE_BYTES):
            found.update(block)
    return found.hexdigest()


def jsonl_pieces(path: Path, *, piece_bytes: int = _PIECE_BYTES) -> tuple[str, list[Piece]]:
    """A hash of the file, and its pieces: each ends with a line, and knows the number of its first."""
    found, pieces = hashlib.sha256(), []
    start, first, position, lines = 0, 1, 0, 0
    with path.open("rb") as file:
        while block := file.read(piece_bytes):
            found.update(block)
            last = block.rfind(b"\n")
            if last >= 0:
                lines += block.count(b"\n")
                end = position + last + 1
                pieces.append({"kind": "jsonl", "start": start, "end": end, "first": first})
                start, first = end, 1 + lines
            position += len(block)
    if position > start:
        pieces.append({"kind": "jsonl", "start": start, "end": position, "first": first})
    return found.hexdigest(), pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetShape:
    """What a parquet file says of itself."""

    num_rows: int
    holds_json: bool
    """Whether `datasets` has put JSON texts into columns that are to be read as values."""
    pieces: list[Piece]
    """Neighbouring row groups, taken together until they are worth a task."""


def parquet_shape(path: Path) -> ParquetShape:
    """Look at a parquet file without reading its rows."""
    import pyarrow.parquet

    with _readable(path):
        metadata = pyarrow.parquet.read_metadata(path)
    pieces: list[Piece] = []
    row = 0
    for group in range(metadata.num_row_groups):
        if not pieces or row - pieces[-1]["first"] + 1 >= _PIECE_ROWS:
            pieces.append({"kind": "parquet", "row_groups": [], "first": row + 1})
        pieces[-1]["row_groups"].append(group)
        row += metadata.row_group(group).num_rows
    features = (metadata.metadata or {}).get(b"huggingface", b"")
    return ParquetShape(num_rows=row, holds_json=b'"Json"' in features, pieces=pieces)


def parquet_batches(path: Path, row_groups: list[int] | None = None) -> Iterator[list[dict]]:
    """Rows of a parquet file, or of some of its row groups, a few at a time."""
    import pyarrow.parquet

    with _readable(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=row_groups):
            yield batch.to_pylist()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as err:
        raise ValueError(f"{path} cannot be read as parquet: {err}") from err
