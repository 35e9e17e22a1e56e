"""Which of the ranks that hold a slice sends it: an even load, between few pairs. Pure.

Ranks with equal holdings are replicas. Their number, and that of the engines, are divided by what divides both: a block of
replicas serves a block of engines, all blocks in the same way, so that the sources of one block are chosen for all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mgrpo.layout import ALL_DIRECT, MOST_GROUPS

SMALL = 0.001
"""Norms and the like: a kind that is a smaller part of what a worker receives costs no pair of its own, whoever owes it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The slices of a worker that the same ranks hold."""

    worker: int
    tables: tuple[int, ...]
    """Tables of `HeldBoxes` that have them."""
    ends: np.ndarray
    """`[slices]`, elements up to the end of each."""


class Portion(NamedTuple):
    """Slices `first` to `last` of a kind, which replica number `replica` of a table sends to an engine of its block."""

    kind: int
    first: int
    last: int
    table: int
    replica: int


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of all engines that training ranks send to."""

    ranks: Sequence[Sequence[int]]
    """For each table the ranks that hold it."""
    blocks: int
    """Engine number e belongs to block e % blocks, and is number e // blocks in it."""
    shares: Sequence[Sequence[Portion]]
    """For each engine of a block."""

    @property
    def engines(self) -> int:
        """Their number."""
        return self.blocks * len(self.shares)

    def trees(self, engines: int) -> int | None:
        """Below how many engines the others stand; None: training ranks send to all of them."""
        return None if engines <= ALL_DIRECT else self.engines

    def rank(self, share: Portion, engine: int) -> int:
        """The rank that sends this share to an engine."""
        ranks = self.ranks[share.table]
        return ranks[engine % self.blocks * (len(ranks) // self.blocks) + share.replica]

    def of(self, rank: int) -> list[tuple[int, Portion]]:
        """What a rank sends, with the engine that it sends it to."""
        table = next(number for number, ranks in enumerate(self.ranks) if rank in ranks)
        block, replica = divmod(self.ranks[table].index(rank), len(self.ranks[table]) // self.blocks)
        return [
            (place * self.blocks + block, share)
            for place, shares in enumerate(self.shares)
            for share in shares
            if share.table == table and share.replica == replica
        ]

    @property
    def most_groups(self) -> int:
        """Engines that the busiest rank sends to."""
        places: dict[tuple[int, int], set[int]] = {}
        for place, shares in enumerate(self.shares):
            for share in shares:
                places.setdefault((share.table, share.replica), set()).add(place)
        return max(map(len, places.values()))


def choose(kinds: Sequence[Kind], ranks: Sequence[Sequence[int]], engines: int) -> Sources:
    """The sources of as many of the engines as no rank sends to more than `MOST_GROUPS` of.

    One of these is for engines that are served apart from the others, where there are more than `ALL_DIRECT`.

    Args:
        ranks: of every table that holds something of a kind, otherwise none.
    """
    replicas = math.gcd(*(len(each) for each in ranks if each))
    most = MOST_GROUPS if engines <= ALL_DIRECT else MOST_GROUPS - 1
    direct = min(engines, most * replicas)
    found = _blocks(kinds, ranks, replicas, direct)
    if found.most_groups > most and direct % replicas and direct > replicas:
        found = _blocks(kinds, ranks, replicas, direct - direct % replicas)
    return found


def _blocks(kinds: Sequence[Kind], ranks: Sequence[Sequence[int]], replicas: int, engines: int) -> Sources:
    blocks = math.gcd(replicas, engines)
    return Sources(ranks, blocks, _shares(kinds, [len(each) // blocks for each in ranks], engines // blocks))


def _shares(kinds: Sequence[Kind], replicas: Sequence[int], engines: int) -> list[list[Portion]]:
    """Replicas owe equal parts of what is wanted of their holdings.

    What few ranks hold comes first: others fill the gaps. A worker goes on receiving from the ranks that it receives from
    already until they have given their part, since every pair costs a connection.
    """
    holders = [[(table, n) for table in kind.tables for n in range(replicas[table])] for kind in kinds]
    count_of = [*map(len, holders)].__getitem__
    owed = {source: 0 for each in holders for source in each}
    wanted: dict[int, int] = {}
    for kind in kinds:
        wanted[kind.worker] = wanted.get(kind.worker, 0) + int(kind.ends[-1])
    found: list[list[Portion]] = [[] for _ in range(engines)]
    pairs: list[dict[int, set[tuple[int, int]]]] = [{} for _ in range(engines)]
    by_choice = {
        count: [*group] for count, group in itertools.groupby(sorted(range(len(kinds)), key=count_of), key=count_of)
    }
    for count, numbers in by_choice.items():
        for number in numbers:
            for source in holders[number]:
                owed[source] += engines * int(kinds[number].ends[-1]) // count
        for place, number in itertools.product(range(engines), numbers):
            kind = kinds[number]
            paired = pairs[place].setdefault(kind.worker, set())
            if kind.ends[-1] < SMALL * wanted[kind.worker] and (open_pairs := paired.intersection(holders[number])):
                source = max(sorted(open_pairs), key=owed.__getitem__)
                found[place].append(Portion(number, 0, len(kind.ends), *source))
                owed[source] -= int(kind.ends[-1])
            else:
                found[place] += _taken(number, kind.ends, holders[number], owed, paired)
    return found


def _taken(
    kind: int,
    ends: np.ndarray,
    holders: Sequence[tuple[int, int]],
    owed: dict[tuple[int, int], int],
    paired: set[tuple[int, int]],
) -> Iterator[Portion]:
    """The shares of one engine in a kind, which are taken off what their sources owe.

    Args:
        paired: the ranks that send to the worker already, to which the new ones are added.
    """
    first, done = 0, 0
    while first < len(ends):
        open_pairs = [source for source in holders if source in paired and owed[source] > 0]
        source = max(open_pairs or holders, key=owed.__getitem__)
        part = owed[source] if owed[source] > 0 else (int(ends[-1]) - done) // len(holders)
        last = min(max(int(ends.searchsorted(done + part)), first) + 1, len(ends))
        owed[source] -= int(ends[last - 1]) - done
        paired.add(source)
        yield Portion(kind, first, last, *source)
        first, done = last, int(ends[last - 1])
