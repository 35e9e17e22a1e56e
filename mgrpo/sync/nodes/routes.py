"""Routes of the weights where learners and engines share the devices of several nodes. Pure.

A worker receives everything from learners of its own node, through shared memory. A slice that none of them holds goes from a learner
of another node to one that shares its device with a worker that needs it, and which forwards it: each byte enters a node once,
however many of its workers need it. In the first stage learners send their own slices to workers, in each later one the slices of
a round between nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mgrpo.models.placement.box_table import sizes
from mgrpo.models.placement.boxes import Box
from mgrpo.sync.plan import Places, ReshardPlan
from mgrpo.sync.sending.rounds import messages, rounds

ReceivedStage = dict[int, list[Box]]
"""The slices for one worker, by training rank."""
Asked = Mapping[int, Places]
"""Slices that a training rank requests from others, by rank."""
SentRound = dict[int, list[Box]]
"""Boxes that go to, or come from, other training ranks in one round, by rank."""


_Brought = tuple[Box, np.ndarray]
"""A slice, and `[workers]` bool: the workers that need it."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Slices that the same workers need and the same ranks hold."""

    workers: tuple[int, ...]
    holders: tuple[int, ...]
    places: Places
    """Slices of one of these workers; those of the others are equal."""


class NodeRoutes:
    """Routes to all nodes. Every rank computes the same ones, and `Box` objects of its own part alone.

    Args:
        plan: slices of an engine's workers; its senders are not used here.
        nodes: for each training rank the number of its node. Worker w of engine e shares the device of rank e * workers + w.
        bucket_bytes: most bytes that a rank receives in a round between nodes.
    """

    def __init__(self, plan: ReshardPlan, nodes: Sequence[int], *, bucket_bytes: int) -> None:
        self.plan, self.nodes, self.bucket_bytes = plan, nodes, bucket_bytes
        self.num_workers = len(plan.workers)
        self.ranks: dict[int, list[int]] = {}
        """Ranks of each node, ascending."""
        for rank, node in enumerate(nodes):
            self.ranks.setdefault(node, []).append(rank)
        self._asked: dict[int, dict[int, Asked]] = {}

    @cached_property
    def _needs(self) -> np.ndarray:
        """`[slices, workers]` bool: the workers that need a slice, also those that have it under another number."""
        _, same = np.unique(self.plan.slices, axis=0, return_inverse=True)
        needs = np.zeros((same.max(initial=-1) + 1, self.num_workers), dtype=bool)
        for worker, places in enumerate(self.plan.workers):
            needs[same[places], worker] = True
        return needs[same]

    @cached_property
    def _groups(self) -> list[_Group]:
        is_first = np.zeros(len(self.plan.slices), dtype=bool)
        is_first[np.unique(self.plan.slices, axis=0, return_index=True)[1]] = True
        found = []
        for kind, places in zip(self.plan.kinds, self.plan.places, strict=True):
            own = places[is_first[places]]
            holders = tuple(sorted(rank for table in kind.tables for rank in self.plan.sources.ranks[table]))
            workers, which = np.unique(self._needs[own], axis=0, return_inverse=True)
            for number, needing in enumerate(workers):
                found.append(_Group(tuple(needing.nonzero()[0].tolist()), holders, own[which == number]))
        return found

    def node_of(self, engine: int) -> int:
        """Node of an engine."""
        return self.nodes[engine * self.num_workers]

    def asked(self, node: int) -> dict[int, Asked]:
        """For each rank of a node that receives from other nodes, the slices that it requests, by source rank."""
        if node not in self._asked:
            self._asked[node] = self._ask(node)
        return self._asked[node]

    def _ask(self, node: int) -> dict[int, Asked]:
        # Slices that no rank of the node holds, by the workers that need them.
        queues: dict[tuple[int, ...], dict[int, list[Places]]] = {}
        for group in self._groups:
            if not any(self.nodes[rank] == node for rank in group.holders):
                queue = queues.setdefault(group.workers, {})
                for source, places in self._sources(group, node):
                    queue.setdefault(source, []).append(places)
        # Ranks that may forward the same slices get even, contiguous parts of them.
        found: dict[int, dict[int, list[Places]]] = {}
        for workers, queue in queues.items():
            relays = [rank for rank in self.ranks[node] if rank % self.num_workers in workers]
            parts = {source: np.concatenate(queue[source]) for source in sorted(queue)}
            count = sizes(self.plan.slices[np.concatenate([*parts.values()])])
            ends = count.cumsum()
            relay, first = ((ends - (count + 1) // 2) * len(relays) // ends[-1]), 0
            for source, places in parts.items():
                chosen = relay[first : first + len(places)]
                for number in np.unique(chosen).tolist():
                    found.setdefault(relays[number], {}).setdefault(source, []).append(places[chosen == number])
                first += len(places)
        return {
            rank: {source: np.sort(np.concatenate(found[rank][source])) for source in sorted(found[rank])}
            for rank in sorted(found)
        }

    def _sources(self, group: _Group, node: int) -> Iterator[tuple[int, Places]]:
        """Source ranks of a node's slices: replicas share the nodes that lack the slices, or the slices, evenly."""
        lacking = sorted(self.ranks.keys() - {self.nodes[rank] for rank in group.holders})
        turn, replicas, nodes = lacking.index(node), len(group.holders), len(lacking)
        count = sizes(self.plan.slices[group.places])
        ends = count.cumsum()
        # Positions on the line of the parts of all these nodes.
        middle = (ends - (count + 1) // 2) if replicas < nodes else np.zeros_like(ends)
        chosen = (turn * ends[-1] + middle) * replicas // (nodes * ends[-1])
        for number in np.unique(chosen).tolist():
            yield group.holders[number], group.places[chosen == number]

    def network_bytes(self, node: int) -> int:
        """Bytes that a node receives from others in a sync."""
        places = [places for asked in self.asked(node).values() for places in asked.values()]
        return sum(int(sizes(self.plan.slices[each]).sum()) for each in places) * self.plan.itemsize

    def received(self, rank: int) -> list[SentRound]:
        """Boxes that a rank receives from other nodes, by round."""
        asked = self.asked(self.nodes[rank]).get(rank, {})
        return rounds({source: self._messages(places, len(asked)) for source, places in asked.items()})

    def sent(self, rank: int) -> list[SentRound]:
        """Boxes that a rank sends to other nodes, by round."""
        return rounds(
            {
                relay: self._messages(asked[rank], len(asked))
                for node in self.ranks
                for relay, asked in self.asked(node).items()
                if rank in asked
            }
        )

    def _messages(self, places: Places, num_sources: int) -> list[list[Box]]:
        boxes, limit = self.plan.boxes(places), self.bucket_bytes
        return messages(boxes, num_sources, itemsize=self.plan.itemsize, bucket_bytes=limit)

    def stages(self, engine: int) -> list[list[ReceivedStage]]:
        """For each worker of an engine, the slices of each stage; all workers have as many stages."""
        node = self.node_of(engine)
        brought = {relay: self._brought(relay) for relay in self.asked(node)}
        count = 1 + max(map(len, brought.values()), default=0)
        found: list[list[ReceivedStage]] = []
        for worker in range(self.num_workers):
            own = [self._held(node, engine * self.num_workers + worker)]
            own += [{} for _ in range(1, count)]
            for relay, parts in brought.items():
                for stage, part in zip(own[1:], parts, strict=False):
                    if boxes := [box for box, needing in part if needing[worker]]:
                        stage[relay] = boxes
            found.append(own)
        return found

    def _held(self, node: int, seat: int) -> dict[int, list[Box]]:
        """Slices for the worker on rank `seat`'s device that learners of the node hold, preferably that rank itself."""
        places: dict[int, list[Places]] = {}
        for kind, own in zip(self.plan.kinds, self.plan.places, strict=True):
            if kind.worker == seat % self.num_workers:
                holders = sorted(rank for table in kind.tables for rank in self.plan.sources.ranks[table])
                if here := [rank for rank in holders if self.nodes[rank] == node]:
                    places.setdefault(seat if seat in here else here[seat % len(here)], []).append(own)
        return {rank: self.plan.boxes(np.sort(np.concatenate(places[rank]))) for rank in sorted(places)}

    def _brought(self, relay: int) -> list[list[_Brought]]:
        """Slices that a rank receives, by round, with the workers that need them."""
        asked = self.asked(self.nodes[relay])[relay]
        queues = {source: self._needed(places, self._messages(places, len(asked))) for source, places in asked.items()}
        return [[each for part in round_.values() for each in part] for round_ in rounds(queues)]

    def _needed(self, places: Places, queue: list[list[Box]]) -> list[list[_Brought]]:
        """Pair each part of the slices, which come in order, with the workers that need it."""
        ends, begin = sizes(self.plan.slices[places]).cumsum(), 0
        found: list[list[_Brought]] = []
        for message in queue:
            found.append([])
            for box in message:
                place = places[ends.searchsorted(begin, side="right")]
                found[-1].append((box, self._needs[place]))
                begin += box.size
        return found
