"""The slices from each rank to each engine worker, and their rounds. Pure and deterministic: every process computes the same plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.adapters import (
    LoraShape,
    are_apart,
    engine_adapter_boxes,
    sent_tensors,
    training_adapter_boxes,
)
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import engine_boxes, training_boxes
from mgrpo.sync.float32_units import boxes_in_units

T = TypeVar("T")

Incoming = dict[int, list[Box]]
"""The boxes for one worker, by training rank, in the order in which they are sent."""

Part = tuple[Box, int, list[int]]
"""A slice of a wanted box, its size, and the ranks that hold it."""


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Every transfer of one weight sync."""

    received_by: tuple[Incoming, ...]
    """For each worker, the workers of all engines counted through."""
    bytes_moved: int
    """Bytes sent to all workers together."""
    lower_bound: int
    """Bytes that all engine workers hold together: each must arrive, so nothing smaller is possible."""

    @property
    def num_slices(self) -> int:
        """The number of boxes that are sent."""
        return sum(len(boxes) for incoming in self.received_by for boxes in incoming.values())


def plan(
    model: ModelShape,
    train_layout: Layout,
    infer_layout: InferLayout,
    *,
    itemsize: int = 2,
    holdings: Sequence[Sequence[Box]] | None = None,
    lora: LoraShape | None = None,
) -> ReshardPlan:
    """Reshard a model from training ranks to the workers of all engines. Pure: equal arguments give equal plans.

    Args:
        model: shape of the model, `mgrpo.models.shape.ModelShape`.
        train_layout: which learner rank holds what, `mgrpo.layout.Layout`.
        infer_layout: number and tensor-parallel size of the engines, `mgrpo.layout.InferLayout`.
        itemsize: bytes of one weight on the wire, in the engines' dtype.
        holdings: for each training rank the boxes it holds; by default what the layout says, which ZeRO-2 and 3 divide
            further. Boxes of tensors that are not sent do not count.
        lora: the model's adapters, if it has any; where they are not merged they are all that is sent.
    Returns:
        Every slice that is sent, by worker and rank; its `bytes_moved` equal the `lower_bound`.
    Raises:
        ValueError: the holdings overlap or leave part of a tensor out.
    """
    if are_apart(lora):
        workers = engine_adapter_boxes(model, infer_layout, lora) * infer_layout.engines
        held = holdings or training_adapter_boxes(model, train_layout, lora)
    else:
        workers = engine_boxes(model, infer_layout) * infer_layout.engines
        held = holdings or training_boxes(model, train_layout)
    names = {box.name for boxes in workers for box in boxes}
    missing = sent_tensors(model, lora).keys() ^ names
    if missing:
        raise AssertionError(f"the engines' boxes do not cover exactly what is sent: {sorted(missing)[:3]}")
    sources, destinations = ([boxes_in_units(boxes, itemsize) for boxes in each] for each in (held, workers))
    return reshard(sources, destinations, itemsize=itemsize)


def reshard(sources: Sequence[Sequence[Box]], destinations: Sequence[Sequence[Box]], *, itemsize: int) -> ReshardPlan:
    """Cover every destination box by slices of source boxes, each element once, between few pairs and with an even load.

    Ranks that hold the same box owe equal parts of what is wanted of it. A worker goes on receiving from the ranks it
    receives from already until they have given their part, since every pair costs a connection.

    Source boxes of one tensor either are equal (replicas) or do not overlap; anything else is a ValueError.
    """
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, boxes in enumerate(sources):
        for box in dict.fromkeys(boxes):
            holders.setdefault(box.name, {}).setdefault(box, []).append(rank)
    demand = Counter(box for boxes in destinations for box in boxes)
    parts = {box: _parts(box, holders.get(box.name, {})) for box in demand}
    owed = _even_shares(((part, count) for box, count in demand.items() for part in parts[box]), len(sources))
    moved = 0
    received_by = []
    for worker, boxes in enumerate(destinations):
        incoming: Incoming = {}
        for wanted in boxes:
            covered = 0
            for common, size, ranks in parts[wanted]:
                open_pairs = [rank for rank in ranks if rank in incoming and owed[rank] > 0]
                source = max(open_pairs or ranks, key=owed.__getitem__)
                incoming.setdefault(source, []).append(common)
                owed[source] -= size
                covered += size
            if covered != wanted.size:
                raise ValueError(
                    f"{wanted.name}{list(wanted.start)}+{list(wanted.shape)}: engine worker {worker} needs {wanted.size} "
                    f"elements, the training ranks hold {covered} of them (overlapping or missing shards)"
                )
            moved += covered
        received_by.append(incoming)
    return ReshardPlan(
        received_by=tuple(received_by),
        bytes_moved=moved * itemsize,
        lower_bound=sum(box.size for boxes in destinations for box in boxes) * itemsize,
    )


def _parts(wanted: Box, holders: dict[Box, list[int]]) -> list[Part]:
    found = ((wanted.intersect(held), ranks) for held, ranks in holders.items())
    return [(common, common.size, ranks) for common, ranks in found if common is not None]


def _even_shares(wanted: Iterable[tuple[Part, int]], num_sources: int) -> list[int]:
    """Elements that each rank sends if the holders of every part, wanted so many times, send equally much of it."""
    demand: Counter[tuple[int, ...]] = Counter()
    for (_, size, ranks), count in wanted:
        demand[tuple(ranks)] += size * count
    shares = [0] * num_sources
    for holders, size in demand.items():
        for rank in holders:
            shares[rank] += size // len(holders)
    return shares


def messages(
    incoming: Incoming, source: int, *, itemsize: int, bucket_bytes: int, limit: int | None = None
) -> list[list[Box]]:
    """The boxes from one rank to a worker, message by message; both ends compute the same.

    Args:
        bucket_bytes: most bytes of one message from each rank together; a message has an even share of it, or one row.
        limit: most bytes of a message, where that is less than its share.
    """
    share = bucket_bytes // len(incoming)
    return buckets(incoming[source], itemsize=itemsize, bucket_bytes=min(limit or share, share))


def rounds(queues: Mapping[int, Sequence[T]]) -> list[dict[int, T]]:
    """Rounds of messages that are under way at the same time: at most one with each peer, in the order of `queues`."""
    return [
        {peer: queue[number] for peer, queue in queues.items() if number < len(queue)}
        for number in range(max(map(len, queues.values()), default=0))
    ]


def buckets(boxes: Iterable[Box], *, itemsize: int, bucket_bytes: int) -> list[list[Box]]:
    """Cut a pair's boxes into messages of at most `bucket_bytes` (or one row); both ends compute the same cut."""
    limit = max(bucket_bytes // itemsize, 1)
    cut: list[list[Box]] = []
    room = 0
    for box in boxes:
        for part in _rows(box, limit):
            if part.size > room:
                cut.append([])
                room = limit
            cut[-1].append(part)
            room -= part.size
    return cut


def _rows(box: Box, limit: int) -> Iterable[Box]:
    """Parts of the box of at most `limit` elements, or of one row."""
    if box.size <= limit:
        yield box
        return
    dim = next(dim for dim, length in enumerate(box.shape) if length > 1)
    length = box.shape[dim]
    step = max(limit * length // box.size, 1)
    for row in range(0, length, step):
        start, shape = list(box.start), list(box.shape)
        start[dim] += row
        shape[dim] = min(step, length - row)
        yield Box(box.name, tuple(start), tuple(shape))
