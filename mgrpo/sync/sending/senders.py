"""Choice of the rank that sends a slice among its holders: an even load over few pairs. Pure.

Ranks with equal holdings are replicas. Replicas and engines are divided into as many blocks as their greatest common divisor: each
block of replicas serves a block of engines in the same way, so that sources are chosen for one block alone.
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
"""Kinds (as norms) below this share of a worker's elements get no pair of their own if a holder sends to the worker already."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The slices of a worker that the same ranks hold."""

    worker: int
    tables: tuple[int, ...]
    """Tables of `HeldBoxes` that contain them."""
    ends: np.ndarray
    """`[slices]`, cumulative elements."""


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
    """Ranks that hold each table."""
    blocks: int
    """Engine number e belongs to block e % blocks, and is number e // blocks in it."""
    shares: Sequence[Sequence[Portion]]
    """Portions of each engine of a block."""

    @property
    def engines(self) -> int:
        """Number of the engines."""
        return self.blocks * len(self.shares)

    def trees(self, engines: int) -> int | None:
        """Number of broadcast trees; None: training ranks send to all engines."""
        return None if engines <= ALL_DIRECT else self.engines

    def rank(self, share: Portion, engine: int) -> int:
        """The rank that sends this share to an engine."""
        ranks = self.ranks[share.table]
        return ranks[engine % self.blocks * (len(ranks) // self.blocks) + share.replica]

    def of(self, rank: int) -> list[tuple[int, Portion]]:
        """The portions that a rank sends, each with its engine."""
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
    """Sources of as many engines as possible with no rank sending to more than `MOST_GROUPS` of them.

    With more than `ALL_DIRECT` engines one of these groups is kept for the separate tree.

    Args:
        ranks: for each table its ranks; empty for tables that hold no slice.
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
    """Portions of each engine of a block: replicas send equal parts of the slices that they hold.

    Kinds with few holders come first; the others fill the gaps. A worker keeps its present senders until they have sent their
    part, since each pair costs a connection.
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
    """Portions of one engine in a kind; subtracts them from `owed`.

    Args:
        paired: the ranks that send to the worker already; new ones are added.
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
