"""The reshard plan: complete, minimal, balanced, the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.table import Box, engine_boxes, hf_tensors
from mgrpo.sync.plan import buckets, plan, reshard
from tests.unit.models.test_table import MODELS

PAIRS = [
    (Layout(world_size=1), InferLayout()),
    (Layout(world_size=2, tensor=2), InferLayout()),
    (Layout(world_size=2, tensor=2), InferLayout(tensor=4)),
    (Layout(world_size=8, tensor=4, pipeline=2), InferLayout(engines=3, tensor=2)),
    (Layout(world_size=4), InferLayout(engines=2)),
]


@pytest.mark.parametrize(("train", "infer"), PAIRS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_worker_receives_every_element_once(name, train, infer):
    """A hole leaves old weights in the engine without an error; a double is wasted bandwidth."""
    model = shape_of(MODELS[name])
    made = plan(model, train, infer, itemsize=2)
    wanted = engine_boxes(model, infer)
    for worker in range(infer.engines * infer.tensor):
        got = {tensor: np.zeros(shape, dtype=int) for tensor, shape in hf_tensors(model).items()}
        for transfer in made.transfers:
            if transfer.destination == worker:
                box = transfer.box
                got[box.name][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] += 1
        for box in wanted[worker % infer.tensor]:
            region = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            assert (got[box.name][region] == 1).all()
            got[box.name][region] = 0
        assert not any(rest.any() for rest in got.values()), "something was sent that the worker does not hold"
    assert made.bytes_moved == made.lower_bound
    assert made == plan(model, train, infer, itemsize=2)


def test_replicas_share_the_load():
    """One data-parallel replica that sends everything is the bottleneck of every peer."""
    model = shape_of(MODELS["qwen3"])
    made = plan(model, Layout(world_size=4), InferLayout(), itemsize=2)
    sent = [sum(box.size for boxes in made.sent_by(rank).values() for box in boxes) for rank in range(4)]
    assert max(sent) - min(sent) <= max(box.size for boxes in engine_boxes(model, InferLayout()) for box in boxes)


def test_a_missing_shard_is_named():
    """Training ranks that do not hold a row cannot send it."""
    with pytest.raises(ValueError, match=r"w.*worker 0 needs 8 elements, the training ranks hold 6"):
        reshard([[Box("w", (0, 0), (3, 2))]], [[Box("w", (0, 0), (4, 2))]], itemsize=4)


def test_buckets_are_bounded_and_complete():
    """A bucket larger than its bound is the memory peak the bound is there to prevent."""
    boxes = [Box("a", (0, 0), (100, 7)), Box("b", (5,), (3,)), Box("c", (0, 2), (1, 900))]
    cut = buckets(boxes, itemsize=4, bucket_bytes=400)
    assert all(sum(box.size for box in bucket) <= 100 for bucket in cut if bucket[0].name != "c")
    assert sum(box.size for bucket in cut for box in bucket) == sum(box.size for box in boxes)
    assert cut == buckets(boxes, itemsize=4, bucket_bytes=400)
