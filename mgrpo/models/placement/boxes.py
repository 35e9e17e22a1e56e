"""Slices of Hugging Face tensors, and where they lie in the parameters of a rank. Pure: no torch, no processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Piece:
    """A box and the place in the local parameter where it lies (`local` starts a region of the box's shape)."""

    box: Box
    local: Shape

    @property
    def region(self) -> tuple[slice, ...]:
        """Index of the piece in the local parameter."""
        return tuple(slice(a, a + n) for a, n in zip(self.local, self.box.shape, strict=True))


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A box inside a run of a parameter's elements: `run[start : start + size].view(shape)[region]`."""

    box: Box
    start: int
    shape: Shape
    region: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One Megatron parameter on one rank. Rows that no piece covers are vocabulary padding."""

    shape: Shape
    pieces: tuple[Piece, ...]
    is_copy: bool = False
    """The LM head of a tied model's last stage, a copy of the first stage's embedding."""

    def run(self, start: int, stop: int) -> Iterator[FlatPiece]:
        """The pieces that elements `start` to `stop` hold, counted row by row: the shard of an optimizer that ignores rows.

        Each box lies in a partial first row, whole rows, or a partial last row.
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
                common = part.intersect(Box("", piece.local, piece.box.shape))
                if common is not None:
                    box_start = tuple(
                        a - b + c for a, b, c in zip(common.start, piece.local, piece.box.start, strict=True)
                    )
                    box = Box(piece.box.name, box_start, common.shape)
                    yield FlatPiece(box, begin - start, part.shape, common.within(part))
