"""How a Megatron parameter is laid out in Hugging Face tensors: the rules of which `table` is made."""

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
    dim: int = 0
    """Along which each tensor is cut before they are stacked."""

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        pieces, rows = [], 0
        for name in self.names:
            local = Split(name, self.dim).place(tensors, rank, size)
            pieces += [Piece(piece.box, (rows, *piece.local[1:])) for piece in local.pieces]
            rows += local.shape[0]
        return LocalParameter((rows, *local.shape[1:]), tuple(pieces))


@dataclass(frozen=True, slots=True)
class Grouped:
    names: tuple[str, ...]
    """Query, key, value."""
    groups: int

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        # The full parameter is group after group of (query rows, key rows, value rows). Each rank takes an equal run of
        # rows, which cuts a group in two when there are fewer groups than ranks.
        widths = [tensors[name][0] // self.groups for name in self.names]
        columns = tensors[self.names[0]][1:]
        rest = (0,) * len(columns)
        share = sum(widths) * self.groups // size
        first, last = rank * share, (rank + 1) * share
        pieces, row = [], 0
        for group in range(self.groups):
            for name, width in zip(self.names, widths, strict=True):
                start, stop = max(row, first), min(row + width, last)
                if start < stop:
                    box = Box(name, (group * width + start - row, *rest), (stop - start, *columns))
                    pieces.append(Piece(box, (start - first, *rest)))
                row += width
        return LocalParameter((share, *columns), tuple(pieces))


@dataclass(frozen=True, slots=True)
class Slices:
    """Those with the numbers `own` of a tensor's first dimension: vectors, or matrices one above the other."""

    name: str
    own: range
    dim: int | None = None
    """Of the tensor, along which each slice is cut; None: it is whole on every rank."""

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


Rule = Replicated | Split | Stacked | Grouped | Slices


def _replace(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim + 1 :])
