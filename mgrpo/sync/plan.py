"""Which rank sends which slice to which engine worker. Pure and deterministic: every process computes the same plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mgrpo.layout import InferLayout, Layout, least_loaded
from mgrpo.models.family import ModelShape
from mgrpo.models.table import Box, engine_boxes, hf_tensors, training_boxes


@dataclass(frozen=True, slots=True)
class Transfer:
    """Training rank `source` sends `box` to engine worker `destination` (workers of all engines, counted through)."""

    source: int
    destination: int
    box: Box


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Every transfer of one weight sync, in the order in which each pair of processes carries them out."""

    transfers: tuple[Transfer, ...]
    bytes_moved: int
    lower_bound: int
    """Bytes that all engine workers hold together: each must arrive, so nothing smaller is possible."""

    def sent_by(self, source: int) -> dict[int, list[Box]]:
        """What one rank sends, by worker."""
        boxes: dict[int, list[Box]] = {}
        for transfer in self.transfers:
            if transfer.source == source:
                boxes.setdefault(transfer.destination, []).append(transfer.box)
        return boxes

    def received_by(self, destination: int) -> dict[int, list[Box]]:
        """What one worker receives, by training rank."""
        boxes: dict[int, list[Box]] = {}
        for transfer in self.transfers:
            if transfer.destination == destination:
                boxes.setdefault(transfer.source, []).append(transfer.box)
        return boxes


def plan(
    model: ModelShape,
    train_layout: Layout,
    infer_layout: InferLayout,
    *,
    itemsize: int = 2,
    holdings: Sequence[Sequence[Box]] | None = None,
) -> ReshardPlan:
    """Reshard a model from training ranks to the workers of all engines.

    Args:
        itemsize: bytes of one weight on the wire, in the engines' dtype.
        holdings: for each training rank the boxes it holds; by default what the layout says, which ZeRO-2 and 3 divide
            further.
    """
    workers = engine_boxes(model, infer_layout) * infer_layout.engines
    names = {box.name for boxes in workers for box in boxes}
    missing = hf_tensors(model).keys() ^ names
    if missing:
        raise AssertionError(f"the engines' boxes do not cover exactly the model: {sorted(missing)[:3]}")
    return reshard(holdings or training_boxes(model, train_layout), workers, itemsize=itemsize)


def reshard(sources: Sequence[Sequence[Box]], destinations: Sequence[Sequence[Box]], *, itemsize: int) -> ReshardPlan:
    """Cover every destination box by slices of source boxes, each element once, the load spread over replicas.

    Source boxes of one tensor either are equal (replicas) or do not overlap; anything else is a ValueError.
    """
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, boxes in enumerate(sources):
        for box in boxes:
            ranks = holders.setdefault(box.name, {}).setdefault(box, [])
            if rank not in ranks:
                ranks.append(rank)
    load = [0] * len(sources)
    transfers = []
    for worker, boxes in enumerate(destinations):
        for wanted in boxes:
            covered = 0
            for held, ranks in holders.get(wanted.name, {}).items():
                common = wanted.intersect(held)
                if common is None:
                    continue
                source = least_loaded(ranks, load)
                load[source] += common.size
                covered += common.size
                transfers.append(Transfer(source, worker, common))
            if covered != wanted.size:
                raise ValueError(
                    f"{wanted.name}{list(wanted.start)}+{list(wanted.shape)}: engine worker {worker} needs {wanted.size} "
                    f"elements, the training ranks hold {covered} of them (overlapping or missing shards)"
                )
    return ReshardPlan(
        transfers=tuple(transfers),
        bytes_moved=sum(load) * itemsize,
        lower_bound=sum(box.size for boxes in destinations for box in boxes) * itemsize,
    )


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
    if box.size <= limit:
        yield box
        return
    width = box.size // box.shape[0]
    step = max(limit // width, 1)
    for row in range(0, box.shape[0], step):
        count = min(step, box.shape[0] - row)
        yield Box(box.name, (box.start[0] + row, *box.start[1:]), (count, *box.shape[1:]))
