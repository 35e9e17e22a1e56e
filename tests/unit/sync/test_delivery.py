"""In which order the rounds of several engines begin."""

from __future__ import annotations

import random

import pytest

from mgrpo.sync.delivery import Delivery, deliver


class Round:
    """Arrives by chance, and may fail instead."""

    def __init__(self, chance: random.Random, failure: str) -> None:
        self.chance, self.failure, self.is_settled = chance, failure, False

    def is_due(self) -> bool:
        return self.chance.random() < 0.3

    def settle(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)
        self.is_settled = True


def order(seed: int, *, failing: tuple[int, int] | None = None) -> tuple[list[tuple[int, int]], dict[int, str]]:
    """Rounds of engines 0, 1, 2 in the order in which they begin on a rank where they arrive by chance; the failures."""
    chance, begun, failures = random.Random(seed), [], {}
    rounds: dict[int, list[Round]] = {0: [], 1: [], 2: []}

    def delivery(engine: int, num_rounds: int) -> Delivery:
        def begin(number: int) -> Round:
            assert sum(not each.is_settled for each in rounds[engine]) < 2
            begun.append((engine, number))
            rounds[engine].append(Round(chance, "gone" if failing == (engine, number) else ""))
            return rounds[engine][-1]

        return Delivery(begin, num_rounds)

    deliver(
        {0: delivery(0, 3), 1: delivery(1, 5), 2: delivery(2, 4)},
        lambda engine, err: failures.update({engine: str(err)}),
    )
    assert all(each.is_settled for engine, own in rounds.items() for each in own if engine not in failures)
    return begun, failures


@pytest.mark.parametrize("seed", range(5))
def test_rounds_begin_in_one_order_whoever_is_slow(seed: int) -> None:
    """With another order on another rank each waits for an engine that waits for the other rank."""
    begun, failures = order(seed)
    assert begun == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2), (1, 3), (2, 3), (1, 4)]
    assert failures == {}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", range(5))
def test_an_engine_that_fails_changes_no_order_of_the_others(seed: int, number: int) -> None:
    """Ranks find the failure at different times."""
    begun, failures = order(seed, failing=(1, number))
    assert failures == {1: "gone"}
    assert [each for each in begun if each[0] != 1] == [(0, 0), (2, 0), (0, 1), (2, 1), (0, 2), (2, 2), (2, 3)]
    assert {number for engine, number in begun if engine == 1} >= set(range(number + 1))
