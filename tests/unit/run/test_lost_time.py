"""The account of what failures cost a run, over three starts with a clock that the test moves."""

from __future__ import annotations

import json

import pytest

from mgrpo.run.report.lost_time import LostTime


class Clock:
    now = 5000.0

    def __call__(self) -> float:
        return self.now


def test_the_account_goes_over_all_starts_of_a_run():
    """Ten seconds a step. Two steps are lost with a minute of restart, then one with two minutes."""
    clock = Clock()

    def steps(account: LostTime, number: int) -> dict[str, float]:
        for _ in range(number):
            clock.now += 10
            metrics = account.step(10)
        return metrics

    first = LostTime(clock=clock)
    first.begin()
    assert steps(first, 3) == {"time/save": 0, "time/since_save": 30, "time/lost": 0, "time/goodput": 1}
    state = json.loads(json.dumps(first.state_dict()))
    clock.now += 5
    first.saved(5)
    assert steps(first, 1) == {"time/save": 5, "time/since_save": 15, "time/lost": 0, "time/goodput": 40 / 45}
    assert steps(first, 1) == {"time/save": 0, "time/since_save": 25, "time/lost": 0, "time/goodput": 50 / 55}
    clock.now += 60
    second = LostTime(state, clock=clock)
    second.begin()
    # Of 125 seconds until here 30 count; the state was taken at 30 and the run went on at 115.
    assert steps(second, 1) == {"time/save": 0, "time/since_save": 10, "time/lost": 85, "time/goodput": 40 / 125}
    state = second.state_dict()
    assert steps(second, 1)["time/since_save"] == 20
    clock.now += 120
    third = LostTime(state, clock=clock)
    third.begin()
    found = steps(third, 1)
    assert found["time/lost"] == 85 + 10 + 120 and found["time/goodput"] == pytest.approx(50 / 265)


def test_a_clock_that_was_set_back_makes_no_time_negative():
    """The machine that goes on may have another clock than the one that has died."""
    clock = Clock()
    account = LostTime(clock=clock)
    account.begin()
    state = account.state_dict()
    clock.now -= 100
    resumed = LostTime(state, clock=clock)
    resumed.begin()
    metrics = resumed.step(10)
    assert metrics["time/lost"] == 0 and metrics["time/goodput"] == 1 and metrics["time/since_save"] == 0
