"""Slices of Hugging Face tensors, and their places in the parameters of a rank. Pure: no torch, no processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular slice of the HF tensor `name`."""

    name: str
    start: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    def intersect(self, other: Box) -> Box | None:
        """The common part of two slices of one tensor, or None."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = [min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Box(self.name, start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The place of this slice inside `outer`, which contains it."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, outer.start, self.shape, strict=True))


class _Viewed(Protocol):
    """A tensor, which this module does not import."""

    def __getitem__(self, region: tuple[slice, ...], /) -> Self: ...

    def view(self, shape: Shape, /) -> Self: ...


Tensor = TypeVar("Tensor", bound=_Viewed)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box and its place in the local parameter.

    The parameter may lack dimensions of the HF tensor; those of the box are then of length 1.
    """

    box: Box
    local: Shape
    """First index of the region in the parameter."""
    dims: tuple[int, ...] | None = None
    """Dimension of the box for each of the parameter's, ascending; None: they are the same."""

    @property
    def place(self) -> Box:
        """The region as a slice of the parameter, which has no name here."""
        shape = self.box.shape
        return Box("", self.local, shape if self.dims is None else tuple(shape[dim] for dim in self.dims))

    @property
    def region(self) -> tuple[slice, ...]:
        """Index of the piece in the local parameter."""
        return self.within(self.box)

    def within(self, part: Box) -> tuple[slice, ...]:
        """Index in the local parameter of a part of the box."""
        dims = self.dims or range(len(part.shape))
        starts = (own + part.start[dim] - self.box.start[dim] for dim, own in zip(dims, self.local, strict=True))
        return tuple(slice(a, a + part.shape[dim]) for dim, a in zip(dims, starts, strict=True))

    def view(self, parameter: Tensor) -> Tensor:
        """The region of a tensor of the parameter's shape, as a view of the box's shape."""
        return parameter[self.region].view(self.box.shape)

    def part(self, region: Box) -> Box:
        """The box of a part of the region."""
        start, shape = list(self.box.start), list(self.box.shape)
        dims = self.dims or range(len(start))
        for dim, first, own, length in zip(dims, region.start, self.local, region.shape, strict=True):
            start[dim] += first - own
            shape[dim] = length
        return Box(self.box.name, tuple(start), tuple(shape))


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A box inside a run of a parameter's elements: `run[start : start + size].view(shape)[region].view(box.shape)`."""

    box: Box
    start: int
    shape: Shape
    region: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One Megatron parameter on one rank, of one or two dimensions. Rows that no piece covers are vocabulary padding."""

    shape: Shape
    pieces: tuple[Piece, ...]
    is_copy: bool = False
    """The LM head of a tied model's last stage, a copy of the first stage's embedding."""

    def run(self, start: int, stop: int) -> Iterator[FlatPiece]:
        """Pieces that elements `start` to `stop` hold, counted row by row: the shard of an optimizer that ignores rows.

        Each box is in a partial first row, whole rows, or a partial last row.
        """
        width = self.shape[1] if len(self.shape) == 2 else 1
        first_whole, last_whole = -(-start // width), stop // width
        if first_whole > last_whole:
            cuts = [(start, stop)]
        else:
            cuts = [(start, first_whole * width), (first_whole * width, last_whole * width), (last_whole * width, stop)]
        for begin, end in cuts:
            if begin == end:
                continue
            rows = max((end - begin) // width, 1)
            corner = (begin // width, begin % width)[: len(self.shape)]
            part = Box("", corner, (rows, (end - begin) // rows)[: len(self.shape)])
            for piece in self.pieces:
                common = part.intersect(piece.place)
                if common is not None:
                    yield FlatPiece(piece.part(common), begin - start, part.shape, common.within(part))
