"""Broadcast trees of the engines, for more engines than learners can serve. Pure; rank 0 decides.

Learners send to the roots. The other engines form a binary tree below each: worker w of an engine forwards the weights to worker w
of its children, whose boxes are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Link = tuple[int, int]
"""An engine and its seat."""
Apart = Literal["tree", "direct"]


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine's place in a tree; replaced when the engine restarts or changes its parent."""

    number: int
    """Unique per engine; names the transfer group."""
    generation: int
    """Engine generation."""
    upstream: Link | None
    """Parent in the tree; None: the learners."""


@dataclass(slots=True)
class Seating:
    """The seats of all engines.

    Args:
        direct: number of trees; None: learners send to every engine.
    """

    direct: int | None = None
    seats: dict[int, Seat] = field(default_factory=dict)
    _apart: set[int] = field(default_factory=set)
    _last: dict[int, int] = field(default_factory=dict)
    _told: dict[Link, list[Link]] = field(default_factory=dict)

    def arrange(self, members: Mapping[int, int], *, apart: Apart | None = None) -> list[int]:
        """Seat the engines that take part in a sync.

        Args:
            members: the generation of each.
            apart: the engines need weights that the others have already: one separate tree, or each directly from the learners.
        Returns:
            Engines that must join again: their seat is new, or their children have changed.
        """
        if apart is None:
            self.seats = {engine: seat for engine, seat in self.seats.items() if engine in members}
        elif self.direct is not None:
            # Learners hold no more than the trees and those that stand apart now.
            for engine in self._apart - members.keys():
                self.seats.pop(engine, None)
        self._apart = set(members) if apart else set()
        direct = self.direct if apart is None or self.direct is None else 1 if apart == "tree" else None
        moved = []
        for engine, above in upstreams(members, direct).items():
            seat = self.seats.get(engine)
            upstream = None if above is None else (above, self.seats[above].number)
            if apart or seat is None or (seat.generation, seat.upstream) != (members[engine], upstream):
                self._last[engine] = max(members[engine], self._last.get(engine, -1) + 1)
                self.seats[engine] = Seat(self._last[engine], members[engine], upstream)
                moved.append(engine)
        below = {self.link(engine): self.followers(engine) for engine in members}
        joining = [e for e in members if e in moved or below[self.link(e)] != self._told.get(self.link(e), [])]
        self._told = {link: told for link, told in (self._told | below).items() if told and self.link(link[0]) == link}
        return joining

    def link(self, engine: int) -> Link:
        """The engine with its seat."""
        return engine, self.seats[engine].number if engine in self.seats else -1

    def first(self, engine: int) -> int:
        """Root of the engine's tree; the whole tree cuts messages by the root's sources."""
        while (upstream := self.seats[engine].upstream) is not None:
            engine = upstream[0]
        return engine

    def followers(self, engine: int) -> list[Link]:
        """The engine's children."""
        own = self.link(engine)
        return [self.link(other) for other, seat in self.seats.items() if seat.upstream == own]

    def heads(self) -> dict[int, int]:
        """Roots of the trees, to which learners send, with their seats."""
        return {engine: seat.number for engine, seat in self.seats.items() if seat.upstream is None}


def upstreams(engines: Mapping[int, int], direct: int | None) -> dict[int, int | None]:
    """Parent of each engine, which precedes it; None: the learners.

    Engine e has place e // direct in tree e % direct. The parent is the nearest ancestor that is present, otherwise the tree's first
    engine: places do not depend on missing engines, so that few parents change when an engine leaves or joins.
    """
    if direct is None:
        return dict.fromkeys(engines)
    found: dict[int, int | None] = {}
    first: dict[int, int] = {}
    for engine in sorted(engines):
        root, place = first.setdefault(engine % direct, engine), engine // direct
        above: int | None = None if engine == root else root
        while place > 0:
            place = (place - 1) // 2
            if place * direct + engine % direct in engines:
                above = place * direct + engine % direct
                break
        found[engine] = above
    return found
