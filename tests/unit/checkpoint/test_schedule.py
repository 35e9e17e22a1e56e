"""When states are due, by a clock that the test moves."""

from __future__ import annotations

import pytest

from mgrpo.checkpoint.saving.schedule import Due, Schedule


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def saved_steps(
    seconds: list[float], *, every_steps: int = 0, every_s: float = 0, waits: tuple[int, ...] = ()
) -> list[int]:
    """The steps after which a run saves whose steps take `seconds`; a save takes none."""
    clock = Clock()
    schedule, saved = Schedule(every_steps=every_steps, every_s=every_s, clock=clock), []
    for step, own in enumerate(seconds, start=1):
        clock.now += own
        if schedule.due(step, may_wait=step in waits) is not Due.NOTHING:
            schedule.saved()
            saved.append(step)
    return saved


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"every_steps": 4}, [4, 8]),
        ({"every_s": 25}, [3, 6, 9]),
        # A state of either kind is the newest one: the minutes count from there.
        ({"every_steps": 4, "every_s": 25}, [3, 4, 7, 8]),
        ({"every_s": 25, "waits": (3, 4)}, [5, 8]),
        # Where it is due by steps it is a good step, whatever it is.
        ({"every_steps": 4, "waits": (4,)}, [4, 8]),
        ({"every_s": 10}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_states_are_due_by_steps_and_by_time(given, expected):
    """A run of long steps that saved by steps alone would lose hours; one that saved twice in a row would pay twice."""
    assert saved_steps([10.0] * 9, **given) == expected


def test_a_long_step_is_followed_by_one_state_and_not_by_several():
    """What a clock has missed is not made up for: there is one state to save."""
    assert saved_steps([10, 100, 10, 10, 10], every_s=30) == [2, 5]
