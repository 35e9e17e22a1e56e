"""The slices from each rank to each engine worker. Pure and deterministic: every process computes the same plan.

Engines are equal: the slices of a worker are found once for all engines, and only the ranks that send them differ (`sources`).
Everything stays in tables; a process makes `Box` objects of its own part alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.adapters import (
    LoraShape,
    are_apart,
    engine_adapter_boxes,
    sent_tensors,
    training_adapter_boxes,
)
from mgrpo.models.placement.box_table import HeldBoxes, Rows, Tensors, common, sizes
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.sync.sending.float32_units import shapes_in_units, tables_in_units
from mgrpo.sync.sending.layout_tables import engine_rows, training_holdings
from mgrpo.sync.sending.senders import Kind, Portion, Sources, choose

Places = np.ndarray
"""Numbers of slices in `ReshardPlan.slices`, ascending."""
Seated = tuple[tuple[Portion, int], ...]
"""The shares of an engine, each with its sender's place among the ranks that send to the engine."""
Incoming = Mapping[int, Places]
"""The slices for one worker, by training rank, in the order in which they are sent."""


class SentBoxes(NamedTuple):
    """The boxes from one rank to one worker of one engine in a sync."""

    engine: int
    worker: int
    rank: int
    boxes: list[Box]


@dataclass(frozen=True)
class ReshardPlan:
    """Every transfer of one weight sync."""

    tensors: Tensors
    slices: Rows
    """All slices of one engine: worker by worker, each in the order of its boxes."""
    workers: Sequence[slice]
    """Range of `slices` of each worker."""
    kinds: Sequence[Kind]
    places: Sequence[Places]
    """Slices of each kind."""
    sources: Sources
    engines: int
    itemsize: int
    lower_bound: int
    """Bytes that all engine workers hold together; each must arrive, so no plan moves fewer."""

    @property
    def bytes_moved(self) -> int:
        """Bytes sent to all workers together."""
        return int(sizes(self.slices).sum()) * self.itemsize * self.engines

    @property
    def num_slices(self) -> int:
        """The number of boxes that are sent."""
        return len(self.slices) * self.engines

    @property
    def transfers(self) -> Iterator[SentBoxes]:
        """All boxes that training ranks send; further engines receive the same from one of these engines."""
        for engine in range(self.sources.engines):
            for worker, incoming in enumerate(self.incoming(engine)):
                for rank, places in incoming.items():
                    yield SentBoxes(engine, worker, rank, self.boxes(places))

    def boxes(self, places: Places) -> list[Box]:
        """The slices at these places as boxes."""
        return self.tensors.boxes(self.slices[places])

    def shares(self, engine: int) -> list[tuple[Portion, int]]:
        """The shares of the slices that an engine receives, each with the rank that sends it.

        Engines beyond the planned ones have the shares of a planned one.
        """
        engine %= self.sources.engines
        shares = self.sources.shares[engine // self.sources.blocks]
        return [(share, self.sources.rank(share, engine)) for share in shares]

    def incoming(self, engine: int) -> tuple[Incoming, ...]:
        """The slices for each worker of an engine."""
        found: tuple[dict[int, list[Places]], ...] = tuple({} for _ in self.workers)
        for share, rank in self.shares(engine):
            own = found[self.kinds[share.kind].worker].setdefault(rank, [])
            own.append(self.places[share.kind][share.first : share.last])
        return tuple({rank: _sorted(own) for rank, own in each.items()} for each in found)

    def num_sources(self, engine: int) -> list[int]:
        """Number of ranks that send to each worker of an engine."""
        pairs = {(self.kinds[share.kind].worker, rank) for share, rank in self.shares(engine)}
        return np.bincount([worker for worker, _ in pairs], minlength=len(self.workers)).tolist()

    def learners(self, engine: int) -> list[int]:
        """The ranks that send to an engine, ascending."""
        return sorted({rank for _, rank in self.shares(engine)})

    def seated(self, engine: int) -> tuple[list[int], Seated]:
        """The ranks that send to an engine, ascending, and its shares with the place of each one's rank among them.

        The shares are equal for all engines that are served alike; only the ranks differ.
        """
        shares = self.shares(engine)
        place = {rank: number for number, rank in enumerate(sorted({rank for _, rank in shares}))}
        return [*place], tuple((share, place[rank]) for share, rank in shares)

    def source_places(self, seated: Seated) -> np.ndarray:
        """`[slices, 1]` int64, of each slice the place of the rank that sends it."""
        places = np.empty((len(self.slices), 1), dtype=np.int64)
        for share, place in seated:
            places[self.places[share.kind][share.first : share.last]] = place
        return places

    def outgoing(self, rank: int) -> dict[int, dict[int, Places]]:
        """The slices that a rank sends, by engine and worker."""
        found: dict[int, dict[int, list[Places]]] = {}
        for engine, share in self.sources.of(rank):
            workers = found.setdefault(engine, {})
            own = workers.setdefault(self.kinds[share.kind].worker, [])
            own.append(self.places[share.kind][share.first : share.last])
        return {
            engine: {worker: _sorted(workers[worker]) for worker in sorted(workers)}
            for engine, workers in found.items()
        }

    def proof(self, rank: int) -> dict[int, Places]:
        """The slices whose digests a rank computes, by worker: all holders of a slice share the work, also those that send nothing."""
        found: dict[int, list[Places]] = {}
        for kind, places in zip(self.kinds, self.places, strict=True):
            holders = sorted(holder for table in kind.tables for holder in self.sources.ranks[table])
            if rank in holders:
                number, total = holders.index(rank), int(kind.ends[-1])
                first, last = (int(total * n // len(holders)) for n in (number, number + 1))
                cut = slice(*kind.ends.searchsorted((first, last), side="right"))
                found.setdefault(kind.worker, []).append(places[cut])
        return {worker: _sorted(each) for worker, each in found.items()}


def _sorted(places: Sequence[Places]) -> Places:
    return np.sort(np.concatenate(places))


def plan(
    model: ModelShape,
    train_layout: Layout,
    infer_layout: InferLayout,
    *,
    itemsize: int = 2,
    holdings: HeldBoxes | None = None,
    lora: LoraShape | None = None,
) -> ReshardPlan:
    """Reshard a model from training ranks to the workers of all engines. Pure: equal arguments give equal plans.

    Args:
        model: shape of the model, `mgrpo.models.shape.ModelShape`.
        train_layout: layout of the learner ranks, `mgrpo.layout.Layout`.
        infer_layout: number and layout of the engines, `mgrpo.layout.InferLayout`.
        itemsize: bytes of one weight on the wire, in the engines' dtype.
        holdings: the boxes of each training rank; by default those of the layout, which ZeRO-2 and 3 divide further. Boxes
            of tensors that are not sent do not count.
        lora: the model's adapters, if it has any; unless they are merged, only they are sent.
    Returns:
        Every slice that is sent, by worker and rank; its `bytes_moved` equal the `lower_bound`.
    Raises:
        ValueError: the holdings overlap or do not cover a tensor.
    """
    shapes = sent_tensors(model, lora)
    tensors = Tensors(shapes)
    if are_apart(lora):
        wanted = [tensors.rows(boxes) for boxes in engine_adapter_boxes(model, infer_layout, lora)]
        held = holdings or HeldBoxes.of(training_adapter_boxes(model, train_layout, lora), tensors)
    else:
        wanted = engine_rows(model, infer_layout, shapes, tensors)
        held = holdings or training_holdings(model, train_layout)
    covered = np.zeros(len(tensors), dtype=bool)
    covered[np.concatenate(wanted)[:, 0]] = True
    if not covered.all():
        missing = [name for name, is_covered in zip(tensors.names, covered, strict=True) if not is_covered]
        raise AssertionError(f"the engines' boxes do not cover what is sent: {missing[:3]}")
    tables = tensors.renumbered(held.tables, held.tensors)
    in_units = Tensors(shapes_in_units(shapes, itemsize))
    return reshard(
        HeldBoxes(in_units, tables_in_units(tables, tensors, itemsize), held.ranks),
        tables_in_units(wanted, tensors, itemsize),
        engines=infer_layout.engines,
        itemsize=itemsize,
    )


def reshard(held: HeldBoxes, wanted: Sequence[Rows], *, engines: int, itemsize: int) -> ReshardPlan:
    """Cover every box of an engine's workers by slices of the ranks' boxes, each element once.

    Boxes of one tensor that ranks hold either are equal (replicas) or do not overlap; anything else is a ValueError.

    Args:
        wanted: for each worker, rows of the same tensors.
    """
    boxes, holders = _distinct(held.tables)
    every = np.concatenate(wanted)
    by_wanted, by_box = _same_tensor(every, boxes)
    slices, is_common = common(every[by_wanted], boxes[by_box])
    slices, by_wanted, by_box = slices[is_common], by_wanted[is_common], by_box[is_common]
    _check_covered(every, slices, by_wanted, wanted, held.tensors)
    worker = np.repeat(np.arange(len(wanted)), [len(rows) for rows in wanted])[by_wanted]
    ends = worker.searchsorted(np.arange(len(wanted)), side="right").tolist()
    # Slices of one worker that the same ranks hold.
    tables = {each: number for number, each in enumerate(dict.fromkeys(holders))}
    of_box = np.array([tables[each] for each in holders])
    key = worker * len(tables) + of_box[by_box]
    order = key.argsort(kind="stable")
    found, firsts = np.unique(key[order], return_index=True)
    places = np.split(order, firsts[1:])
    count, sets = sizes(slices), [*tables]
    kinds = [
        Kind(number // len(sets), sets[number % len(sets)], count[own].cumsum())
        for number, own in zip(found.tolist(), places, strict=True)
    ]
    used = {table for kind in kinds for table in kind.tables}
    ranks = [each if table in used else () for table, each in enumerate(held.ranks)]
    return ReshardPlan(
        tensors=held.tensors,
        slices=slices,
        workers=[slice(start, end) for start, end in zip([0, *ends], ends, strict=False)],
        kinds=kinds,
        places=places,
        sources=choose(kinds, ranks, engines),
        engines=engines,
        itemsize=itemsize,
        lower_bound=int(sizes(every).sum()) * itemsize * engines,
    )


def _distinct(tables: Sequence[Rows]) -> tuple[Rows, list[tuple[int, ...]]]:
    """The boxes of all tables, by tensor and start, and for each the tables that have it."""
    rows, table = np.concatenate(tables), np.repeat(np.arange(len(tables)), [len(each) for each in tables])
    order = np.lexsort((table, *rows.T[::-1]))
    rows, table = rows[order], table[order]
    is_new = np.ones(len(rows), dtype=bool)
    is_new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    firsts = is_new.nonzero()[0].tolist()
    numbers = table.tolist()
    bounds = zip(firsts, [*firsts[1:], len(rows)], strict=True)
    return rows[is_new], [tuple(dict.fromkeys(numbers[first:last])) for first, last in bounds]


def _same_tensor(wanted: Rows, boxes: Rows) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of a wanted box and one of `boxes` of its tensor, by the wanted box; `boxes` are sorted by tensor."""
    first, last = (boxes[:, 0].searchsorted(wanted[:, 0], side=side) for side in ("left", "right"))
    counts = last - first
    by_wanted = np.repeat(np.arange(len(wanted)), counts)
    within = np.arange(len(by_wanted)) - np.repeat(counts.cumsum() - counts, counts)
    return by_wanted, first[by_wanted] + within


def _check_covered(every: Rows, slices: Rows, by_wanted: np.ndarray, wanted: Sequence[Rows], tensors: Tensors) -> None:
    covered = np.bincount(by_wanted, weights=sizes(slices), minlength=len(every)).astype(np.int64)
    wrong = (covered != sizes(every)).nonzero()[0]
    if len(wrong):
        box = tensors.boxes(every[wrong[:1]])[0]
        worker = int(np.searchsorted(np.cumsum([len(rows) for rows in wanted]), wrong[0], side="right"))
        raise ValueError(
            f"{box.name}{list(box.start)}+{list(box.shape)}: engine worker {worker} needs {box.size} elements, the training "
            f"ranks hold {covered[wrong[0]]} of them (overlapping or missing shards)"
        )
