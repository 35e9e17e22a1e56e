"""Tensors of the model in units of the engines' weight type, as a sync sends them.

Tensors that are always float32 (`is_frozen`) are sent with all their bits, each number as two units if those have half its size;
their boxes and views are in units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import numpy as np
import torch

from mgrpo.models.placement.box_table import MAX_DIMS, Rows, Tensors
from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.models.placement.mlp_rows import is_frozen

FLOAT32_BYTES = 4
V = TypeVar("V")


def in_units(shape: Shape, name: str, itemsize: int) -> Shape:
    """A shape or a first index of the HF tensor `name`, counted in units of `itemsize` bytes if it is float32."""
    return (*shape[:-1], shape[-1] * (FLOAT32_BYTES // itemsize)) if is_frozen(name) else shape


def tables_in_units(tables: Iterable[Rows], tensors: Tensors, itemsize: int) -> list[Rows]:
    """The boxes in the plan's units."""
    frozen = np.array([is_frozen(name) for name in tensors.names])
    found = [*tables]
    for number, rows in enumerate(found) if frozen.any() else ():
        found[number] = rows.copy()
        which = frozen[rows[:, 0]].nonzero()[0]
        last = tensors.dims[rows[which, 0]]
        for column in (last, last + MAX_DIMS):
            found[number][which, column] *= FLOAT32_BYTES // itemsize
    return found


def shapes_in_units(shapes: Mapping[str, Shape], itemsize: int) -> dict[str, Shape]:
    """The tensors' shapes in the plan's units."""
    return {name: in_units(shape, name, itemsize) for name, shape in shapes.items()}


def views_in_units(held: Iterable[tuple[Box, V]], dtype: torch.dtype) -> Iterator[tuple[Box, V | torch.Tensor]]:
    """Boxes and views in the plan's units, which are of the engines' weight type `dtype`."""
    for box, view in held:
        if is_frozen(box.name):
            assert isinstance(view, torch.Tensor) and view.dtype is torch.float32, (box, view)
            yield _in_units(box, dtype.itemsize), view.view(dtype)
        else:
            yield box, view


def _in_units(box: Box, itemsize: int) -> Box:
    if not is_frozen(box.name):
        return box
    return Box(box.name, in_units(box.start, box.name, itemsize), in_units(box.shape, box.name, itemsize))
