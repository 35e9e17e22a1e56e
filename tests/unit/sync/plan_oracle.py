"""The reshard plan box by box, engine by engine: slow, and plain to see. What the plan's tables must come up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mgrpo.models.placement.boxes import Box

Incoming = dict[int, list[Box]]
"""The boxes for one worker, by training rank."""


def reshard(sources: Sequence[Sequence[Box]], destinations: Sequence[Sequence[Box]]) -> list[Incoming]:
    """Cover every destination box by slices of source boxes, each element once.

    Ranks that hold the same box owe equal parts of what is wanted of it. A worker goes on receiving from the ranks it receives
    from already until they have given their part.
    """
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, boxes in enumerate(sources):
        for box in dict.fromkeys(boxes):
            holders.setdefault(box.name, {}).setdefault(box, []).append(rank)
    demand = Counter(box for boxes in destinations for box in boxes)
    parts = {
        wanted: [(common, ranks) for box, ranks in holders[wanted.name].items() if (common := wanted.intersect(box))]
        for wanted in demand
    }
    owed = [0] * len(sources)
    for wanted, count in demand.items():
        for common, ranks in parts[wanted]:
            for rank in ranks:
                owed[rank] += common.size * count // len(ranks)
    received_by: list[Incoming] = []
    for boxes in destinations:
        incoming: Incoming = {}
        for wanted in boxes:
            for common, ranks in parts[wanted]:
                open_pairs = [rank for rank in ranks if rank in incoming and owed[rank] > 0]
                source = max(open_pairs or ranks, key=owed.__getitem__)
                incoming.setdefault(source, []).append(common)
                owed[source] -= common.size
        received_by.append(incoming)
    return received_by
