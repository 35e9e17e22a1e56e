"""Who writes which box, and whether all boxes together are the tensors."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mgrpo.checkpoint.boxes import assign, covers
from mgrpo.layout import Layout
from mgrpo.models.family import shape_of
from mgrpo.models.placement.boxes import Box
from mgrpo.models.table import hf_tensors, training_boxes
from tests.unit.checkpoint.states import ITEMSIZES, SHAPES, cut, make_holdings, region
from tests.unit.models.test_table import MODELS


@pytest.mark.parametrize("seed", range(20))
def test_every_box_has_exactly_one_writer_that_holds_it(seed):
    """A box with two writers is written twice; one with none is lost at the next resume."""
    holdings = make_holdings(seed, world_size=5)
    written = [holdings[rank][index] for rank, indices in enumerate(assign(holdings, ITEMSIZES)) for index in indices]
    assert len(written) == len(set(written))
    assert set(written) == {item for held in holdings for item in held}
    assert assign(holdings, ITEMSIZES) == assign(holdings, ITEMSIZES)


def test_replicas_share_the_writing():
    """One data-parallel rank that writes everything makes a save as slow as there are ranks."""
    model = shape_of(MODELS["qwen3"])
    held = [
        [(kind, box) for kind in ITEMSIZES for box in boxes] for boxes in training_boxes(model, Layout(world_size=4))
    ]
    load = [
        sum(held[rank][i][1].size * ITEMSIZES[held[rank][i][0]] for i in indices)
        for rank, indices in enumerate(assign(held, ITEMSIZES))
    ]
    assert max(load) - min(load) <= max(box.size * 4 for _, box in held[0])
    assert max(load) < 1.1 * sum(load) / 4


def test_what_only_one_rank_holds_is_counted_before_replicas_are_given_out():
    """Otherwise the rank that must write the most also writes what others could."""
    own, shared = ("master", Box("w", (0,), (8,))), ("master", Box("v", (0,), (10,)))
    assert assign([[shared, own], [shared]], {"master": 4}) == [[1], [0]]


def test_a_box_held_twice_by_one_rank_is_written_once():
    """A tied embedding appears as input and as output layer of one rank."""
    item = ("master", Box("w", (0,), (4,)))
    assert assign([[item, item]], {"master": 4}) == [[0]]


def test_shards_that_overlap_are_named_with_their_ranks():
    """Two ranks with different ideas of a layout would overwrite each other's values, and nobody would know."""
    held = [[("master", Box("w", (0, 0), (4, 4)))], [("master", Box("w", (3, 1), (2, 2)))]]
    with pytest.raises(ValueError, match=r"master w\[0:4, 0:4\] of rank 0 and w\[3:5, 1:3\] of rank 1 overlap"):
        assign(held, {"master": 4})


@pytest.mark.parametrize("seed", range(60))
def test_covering_agrees_with_counting(seed):
    """Rows that no piece holds would be whatever memory holds after a resume."""
    rng = random.Random(seed)
    boxes = [box for name, shape in SHAPES.items() for box in cut(rng, Box(name, (0,) * len(shape), shape), 3)]
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(boxes))
        boxes[at : at + 1] = rng.choice([[], [boxes[at]] * 2, [Box(*_moved(boxes[at], rng))]])
    rng.shuffle(boxes)
    counts = {name: np.zeros(shape, dtype=int) for name, shape in SHAPES.items()}
    is_inside = all(
        start >= 0 and start + length <= size
        for box in boxes
        for start, length, size in zip(box.start, box.shape, SHAPES[box.name], strict=True)
    )
    for box in boxes:
        counts[box.name][region(box)] += 1
    if is_inside and all((count == 1).all() for count in counts.values()):
        covers(boxes, SHAPES)
    else:
        with pytest.raises(ValueError):
            covers(boxes, SHAPES)


def _moved(box: Box, rng: random.Random):
    return box.name, tuple(start + rng.randint(0, 1) for start in box.start), box.shape


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box("w", (0, 0), (2, 4))], "w: 8 of 16 elements are present, in 1 pieces"),
        ([], "w: 0 of 16 elements are present"),
        ([Box("w", (0, 0), (4, 4)), Box("w", (1, 1), (1, 1))], r"w\[0:4, 0:4\] and w\[1:2, 1:2\] overlap"),
        ([Box("w", (0, 0), (4, 4)), Box("w", (0, 0), (4, 4))], "overlap"),
        ([Box("w", (0, 0), (4, 5))], r"w\[0:4, 0:5\] lies outside its tensor, of shape \[4, 4\]"),
        ([Box("w", (0,), (4,))], "lies outside"),
        ([Box("w", (0, 0), (4, 4)), Box("v", (0,), (1,))], "v is not a tensor of the model"),
    ],
)
def test_a_hole_a_double_and_a_stranger_are_named(boxes, message):
    """`incomplete checkpoint` alone leaves its owner with thousands of pieces to look through."""
    with pytest.raises(ValueError, match=message):
        covers(boxes, {"w": (4, 4)})


@pytest.mark.parametrize(
    "layout", [Layout(world_size=8, tensor=2, pipeline=2), Layout(world_size=4, tensor=4)], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_the_boxes_of_a_model_cover_it(name, layout):
    """Every save checks this; a check that refuses a sound model would refuse every save."""
    model = shape_of(MODELS[name])
    held = [[("master", box) for box in boxes] for boxes in training_boxes(model, layout)]
    chosen = assign(held, {"master": 4})
    covers([held[rank][i][1] for rank, indices in enumerate(chosen) for i in indices], hf_tensors(model))
