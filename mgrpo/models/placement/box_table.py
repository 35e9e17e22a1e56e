"""Boxes as rows of numbers, for comparing and sending hundreds of thousands, and the ranks that hold them. Pure."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from mgrpo.models.placement.boxes import Box, Shape

MAX_DIMS = 3
COLUMNS = 1 + 2 * MAX_DIMS
"""The tensor's number, the start and the shape; dimensions that a tensor lacks begin at 0 and are of length 1."""

WORD = np.dtype("<i4")
"""Type of a packed table."""
COMPRESSION = 3
"""Level of compression; higher ones take longer and save next to nothing."""

Rows = np.ndarray
"""`[boxes, COLUMNS]` int64."""


class Tensors:
    """Tensors by number; rows of boxes refer to these."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.names = tuple(shapes)
        self.dims = np.fromiter(map(len, shapes.values()), dtype=np.int64, count=len(shapes))
        """Number of dimensions of each."""
        self.numbers = {name: number for number, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, boxes: Iterable[Box]) -> Rows:
        """The boxes as rows, in their order."""
        found = [
            (self.numbers[box.name], *_filled(box.start, 0), *_filled(box.shape, 1))
            for box in boxes
            if box.name in self.numbers
        ]
        return np.array(found, dtype=np.int64).reshape(-1, COLUMNS)

    def boxes(self, rows: Rows) -> list[Box]:
        """The inverse of `rows`."""
        return [
            Box(self.names[tensor], tuple(extent[:dims]), tuple(extent[MAX_DIMS : MAX_DIMS + dims]))
            for (tensor, *extent), dims in zip(rows.tolist(), self.dims[rows[:, 0]].tolist(), strict=True)
        ]

    def renumbered(self, tables: Sequence[Rows], other: Tensors) -> Sequence[Rows]:
        """Tables of `other`'s numbers under these ones, without boxes of tensors that are not among these."""
        if other.names == self.names:
            return tables
        number = np.array([self.numbers.get(name, -1) for name in other.names], dtype=np.int64)
        found = (np.concatenate((number[rows[:, :1]], rows[:, 1:]), axis=1) for rows in tables)
        return [rows[rows[:, 0] >= 0] for rows in found]


def _filled(extent: Shape, value: int) -> Shape:
    return (*extent, *(value,) * (MAX_DIMS - len(extent)))


def starts(rows: Rows) -> np.ndarray:
    """`[boxes, MAX_DIMS]`."""
    return rows[:, 1 : 1 + MAX_DIMS]


def lengths(rows: Rows) -> np.ndarray:
    """`[boxes, MAX_DIMS]`."""
    return rows[:, 1 + MAX_DIMS :]


def sizes(rows: Rows) -> np.ndarray:
    """`[boxes]`, numbers of elements."""
    return lengths(rows).prod(axis=1)


def common(a: Rows, b: Rows) -> tuple[Rows, np.ndarray]:
    """Common part of each pair of boxes of one tensor, and True where it is not empty."""
    start = np.maximum(starts(a), starts(b))
    length = np.minimum(starts(a) + lengths(a), starts(b) + lengths(b)) - start
    return np.concatenate((a[:, :1], start, length), axis=1), (length > 0).all(axis=1)


def packed(table: np.ndarray) -> str:
    """`[rows, columns]` whole numbers of 31 bits as text; differences between neighbouring rows are stored, which are small."""
    assert not len(table) or np.abs(table).max() < 1 << 30, "numbers do not fit"
    steps = np.diff(table, axis=0, prepend=0)
    return base64.b64encode(zlib.compress(steps.T.astype(WORD).tobytes(), COMPRESSION)).decode()


def unpacked(text: str, columns: int) -> np.ndarray:
    """The inverse of `packed`, int64."""
    steps = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=WORD).reshape(columns, -1)
    return steps.T.astype(np.int64).cumsum(axis=0)


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """Boxes held by each rank. Ranks that hold the same, data-parallel replicas, share one table."""

    tensors: Tensors
    tables: Sequence[Rows]
    ranks: Sequence[Sequence[int]]
    """Ranks that hold each table, ascending; every rank is in one of them."""

    def boxes(self, rank: int) -> list[Box]:
        """The boxes of a rank."""
        (rows,) = (rows for rows, ranks in zip(self.tables, self.ranks, strict=True) if rank in ranks)
        return self.tensors.boxes(rows)

    @classmethod
    def of(cls, boxes: Iterable[Iterable[Box]], tensors: Tensors | None = None) -> Self:
        """From the boxes of each rank.

        Args:
            tensors: among which they are counted; by default those of the boxes.
        """
        each = [list(own) for own in boxes]
        tensors = tensors or Tensors({box.name: box.shape for own in each for box in own})
        return cls.shared(tensors, map(tensors.rows, each))

    @classmethod
    def shared(cls, tensors: Tensors, rows: Iterable[Rows]) -> Self:
        """From the rows of each rank."""
        tables: dict[bytes, tuple[Rows, list[int]]] = {}
        for rank, own in enumerate(rows):
            tables.setdefault(own.tobytes(), (own, []))[1].append(rank)
        return cls(tensors, *map(list, zip(*tables.values(), strict=True)))
