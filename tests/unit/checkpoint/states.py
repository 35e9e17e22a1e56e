"""Train states to save and compare: small tensors, cut into random boxes that random ranks hold."""

from __future__ import annotations

import random

import torch

from mgrpo.checkpoint.boxes import assign
from mgrpo.checkpoint.saver import Saver
from mgrpo.checkpoint.shard import Part
from mgrpo.models.placement.boxes import Box

SHAPES = {"embed": (13, 6), "norm": (7,), "proj": (5, 4, 3), "scale": ()}
KINDS = {"master": torch.float32, "exp_avg": torch.float32, "reference": torch.bfloat16}
FULL_SHAPES = dict.fromkeys(KINDS, SHAPES)
ITEMSIZES = {kind: dtype.itemsize for kind, dtype in KINDS.items()}

Values = dict[str, dict[str, torch.Tensor]]
Holdings = list[list[tuple[str, Box]]]


def make_values(seed: int) -> Values:
    """A state, different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        kind: {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
        for kind, dtype in KINDS.items()
    }


def make_holdings(seed: int, world_size: int) -> Holdings:
    """Every tensor cut into random boxes, each held by one rank or several."""
    rng = random.Random(seed)
    holdings: Holdings = [[] for _ in range(world_size)]
    for kind in KINDS:
        for name, shape in SHAPES.items():
            for box in cut(rng, Box(name, (0,) * len(shape), shape), rng.randint(0, 3)):
                for rank in rng.sample(range(world_size), rng.randint(1, world_size)):
                    holdings[rank].append((kind, box))
    for held in holdings:
        rng.shuffle(held)
    return holdings


def cut(rng: random.Random, box: Box, times: int) -> list[Box]:
    """The box in up to `2 ** times` boxes."""
    dims = [dim for dim, length in enumerate(box.shape) if length > 1]
    if not times or not dims:
        return [box]
    dim = rng.choice(dims)
    at = rng.randint(1, box.shape[dim] - 1)
    parts = []
    for start, length in ((0, at), (at, box.shape[dim] - at)):
        own_start, own_shape = list(box.start), list(box.shape)
        own_start[dim] += start
        own_shape[dim] = length
        parts += cut(rng, Box(box.name, tuple(own_start), tuple(own_shape)), times - 1)
    return parts


def parts_of(values: Values, holdings: Holdings) -> list[list[Part]]:
    """What each rank writes."""
    return [
        [part_of(values, *holdings[rank][index]) for index in indices]
        for rank, indices in enumerate(assign(holdings, ITEMSIZES))
    ]


def part_of(values: Values, kind: str, box: Box) -> Part:
    return Part(kind, box, values[kind][box.name][region(box)])


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


def save(root, step: int, values: Values, *, attempt: str | None = None, world_size: int = 3, state=None, **options):
    """Save on all ranks, one after the other: nobody but rank 0 waits for the others."""
    parts = parts_of(values, make_holdings(step, world_size))
    for rank in reversed(range(world_size)):
        saver = Saver(root, rank, world_size, **({"keep_last_n": 3, "timeout_s": 0.2} | options))
        saver.save(step, parts[rank], state or {"step": step}, FULL_SHAPES, attempt or f"run-{step}")
        saver.wait()


def assert_holds(checkpoint, values: Values) -> None:
    """The checkpoint's tensors are `values`, bit by bit."""
    for kind, by_name in values.items():
        assert checkpoint.names(kind) == sorted(by_name)
        for name, value in by_name.items():
            whole = Box(name, (0,) * value.dim(), tuple(value.shape))
            read = checkpoint.read(kind, whole)
            assert read.dtype == value.dtype
            assert torch.equal(read, value), (kind, name)
