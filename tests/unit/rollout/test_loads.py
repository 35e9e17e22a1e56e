"""The engine that a group goes to, and the order in which groups wait, against the plain rules."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mgrpo.rollout.engines.loads import Loads
from mgrpo.rollout.engines.urgency_queue import UrgencyQueue


class ScannedLoads(Loads[Any]):
    """Looks at every engine for every group, and sorts those that are busy for every answer."""

    def _idlest(self, samples: int) -> int | None:
        having_room = [n for n in self._engines if self._has_room(self.by_engine[n], samples)]
        if not having_room:
            return None
        return min(having_room, key=lambda number: (self.by_engine[number].cost, number))

    def is_busy(self, engine: int) -> bool:
        return engine in self.busy()


def request(draw: random.Random) -> SimpleNamespace:
    return SimpleNamespace(
        tokens=np.zeros(draw.randrange(1, 4), np.int32),
        max_tokens=draw.choice((1, 5)),
        sampling=SimpleNamespace(num_samples=draw.choice((1, 4))),
        home=draw.choice((None, None, 0, 3)),
    )


@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize("seed", range(20))
def test_the_heap_chooses_as_a_look_at_every_engine_does(seed, limit) -> None:
    """Engines come and go, fill up and finish: a forgotten entry would send groups to a busy engine, or to one that is gone."""
    draw = random.Random(seed)
    rooms = [Loads(limit, on_change=lambda: None), ScannedLoads(limit, on_change=lambda: None)]
    engines = {number: None for number in range(7)}
    given: list[tuple[int, int]] = []
    for _ in range(600):
        event = draw.random()
        if event < 0.55:
            asked = request(draw)
            places = [room.give(asked, engines) for room in rooms]
            assert places[0] == places[1]
            given += [places[0]] if places[0] else []
        elif event < 0.95 and given:
            engine, number = given.pop(draw.randrange(len(given)))
            for room in rooms:
                room.finish(engine, number)
        elif event > 0.98:
            lost = draw.randrange(7)
            assert len({len(room.drop(lost)) for room in rooms}) == 1
            given = [place for place in given if place[0] != lost]
            engines = {number: None for number in range(7) if number != lost or draw.random() < 0.5}
        assert rooms[0].num_busy == len(rooms[0].busy()) == len({engine for engine, _ in given})
    assert max(map(len, rooms[0]._heaps.values())) <= 2 * 7 + 65


def test_requests_wait_by_urgency_and_then_in_their_order() -> None:
    """Those of a lost engine come before all that are as urgent: they were to be done first."""
    waiting = UrgencyQueue()
    for name, urgency in (("c", 1), ("a", 0), ("d", 1), ("b", 0)):
        waiting.add(name, (urgency, False))
    waiting.add_before((name, (urgency, False)) for name, urgency in (("y", 1), ("x", 0), ("z", 1)))
    assert len(waiting) == 7 and sorted(waiting) == ["a", "b", "c", "d", "x", "y", "z"]
    assert waiting.first == "x" and waiting.pop() == "x"
    waiting.add("e", (0, False))
    assert waiting.clear() == ["a", "b", "e", "y", "z", "c", "d"] and not waiting
