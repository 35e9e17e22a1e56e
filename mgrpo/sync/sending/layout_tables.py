"""Boxes of training ranks and engines by their layouts, as tables. Pure."""

from __future__ import annotations

import numpy as np

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.placement.box_table import HeldBoxes, Rows, Tensors
from mgrpo.models.placement.boxes import Shape
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors, local_parameters, worker_boxes


def training_holdings(model: ModelShape, layout: Layout) -> HeldBoxes:
    """The boxes of every rank, `mgrpo.models.table.training_boxes`."""
    shapes = hf_tensors(model)
    tensors = Tensors(shapes)
    tables: dict[tuple[int, int, int], Rows] = {}
    own = []
    for rank in range(layout.world_size):
        place = layout.coordinate(rank)
        key = place.tensor, place.pipeline, place.expert
        if key not in tables:
            parameters = local_parameters(model, layout, rank, shapes).values()
            tables[key] = tensors.rows(piece.box for parameter in parameters for piece in parameter.pieces)
        own.append(tables[key])
    return HeldBoxes.shared(tensors, own)


def engine_rows(model: ModelShape, layout: InferLayout, shapes: dict[str, Shape], tensors: Tensors) -> list[Rows]:
    """The boxes of an engine's workers, `mgrpo.models.table.engine_boxes`, as rows of `tensors`.

    Args:
        shapes: `hf_tensors(model)`, the tensors of `tensors`.
    """
    # Layers are alike: a worker's boxes of a tensor follow from its shape and its name without the layer.
    alike: dict[tuple[str, Shape], list[int]] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        alike.setdefault((name.removeprefix(model.prefix + "layers.").lstrip("0123456789"), shape), []).append(number)
    workers = []
    for worker in range(layout.workers):
        found = []
        for numbers in alike.values():
            rows = tensors.rows(worker_boxes(tensors.names[numbers[0]], shapes, model, layout, worker))
            found.append(np.tile(rows, (len(numbers), 1)))
            found[-1][:, 0] = np.repeat(numbers, len(rows))
        held = np.concatenate(found)
        workers.append(held[held[:, 0].argsort(kind="stable")])
    return workers
