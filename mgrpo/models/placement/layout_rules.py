"""Rules that map a Megatron parameter to Hugging Face tensors; `table` is made of them."""

from __future__ import annotations

from dataclasses import dataclass

from mgrpo.models.placement.boxes import Box, LocalParameter, Piece, Shape


@dataclass(frozen=True, slots=True)
class Replicated:
    name: str

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        shape = tensors[self.name]
        origin = (0,) * len(shape)
        return LocalParameter(shape, (Piece(Box(self.name, origin, shape), origin),))


@dataclass(frozen=True, slots=True)
class Split:
    name: str
    dim: int = 0
    multiple: int = 1
    """The dimension is padded up to a multiple of this before it is cut."""

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        shape = tensors[self.name]
        share = -(-shape[self.dim] // self.multiple) * self.multiple // size
        start, stop = rank * share, min((rank + 1) * share, shape[self.dim])
        local_shape = _replace(shape, self.dim, share)
        if stop <= start:
            return LocalParameter(local_shape, ())
        box = Box(self.name, _replace((0,) * len(shape), self.dim, start), _replace(shape, self.dim, stop - start))
        return LocalParameter(local_shape, (Piece(box, (0,) * len(shape)),))


@dataclass(frozen=True, slots=True)
class Stacked:
    names: tuple[str, ...]
    dim: int | None = 0
    """Dimension along which each tensor is cut before they are stacked; None: it is whole on every rank."""

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        pieces, rows = [], 0
        for name in self.names:
            own = Replicated(name) if self.dim is None else Split(name, self.dim)
            local = own.place(tensors, rank, size)
            pieces += [Piece(piece.box, (rows, *piece.local[1:])) for piece in local.pieces]
            rows += local.shape[0]
        return LocalParameter((rows, *local.shape[1:]), tuple(pieces))


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of an HF tensor."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Sections:
    """One section below the other. A section is made of rows from anywhere, and each rank takes an equal run of them."""

    sections: tuple[tuple[Rows, ...], ...]

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        columns = tensors[self.sections[0][0].name][1:]
        # The parameter has two dimensions, also where the tensor has one of length 1 between rows and columns.
        dims = (0, 2) if len(columns) == 2 else None
        rest = (0,) * len(columns)
        pieces, top = [], 0
        for section in self.sections:
            share = sum(rows.count for rows in section) // size
            first, last, row = rank * share, (rank + 1) * share, 0
            for rows in section:
                start, stop = max(row, first), min(row + rows.count, last)
                if start < stop:
                    box = Box(rows.name, (rows.first + start - row, *rest), (stop - start, *columns))
                    pieces.append(Piece(box, (top + start - first, *rest[:1]), dims))
                row += rows.count
            top += share
        return LocalParameter((top, *columns[-1:]), tuple(pieces))


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices `own` of a tensor's first dimension: vectors, or matrices one above the other."""

    name: str
    own: range
    dim: int | None = None
    """Dimension of the tensor along which each slice is cut; None: it is whole on every rank."""

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        start, shape = (0,) * len(tensors[self.name]), tensors[self.name]
        if self.dim is not None:
            share = shape[self.dim] // size
            start, shape = _replace(start, self.dim, rank * share), _replace(shape, self.dim, share)
        count, *slice_shape = len(self.own), *shape[1:]
        if len(slice_shape) == 1:
            box = Box(self.name, _replace(start, 0, self.own.start), _replace(shape, 0, count))
            return LocalParameter(box.shape, (Piece(box, (0, 0)),))
        rows, columns = slice_shape
        pieces = (
            Piece(Box(self.name, _replace(start, 0, one), _replace(shape, 0, 1)), (number * rows, 0), dims=(1, 2))
            for number, one in enumerate(self.own)
        )
        return LocalParameter((count * rows, columns), tuple(pieces))


Rule = Replicated | Split | Stacked | Sections | Slices


def _replace(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim + 1 :])
