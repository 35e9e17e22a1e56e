"""After which training steps something is due."""

from __future__ import annotations

import pytest

from mgrpo.run.records import evaluates_after, is_due
from tests.unit.run.producing import config


@pytest.mark.parametrize(("every", "due"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, []), (0, []), (-1, [])])
def test_every_so_many_steps(every: int, due: list[int]) -> None:
    """0 and -1 are off, as in other trainers."""
    assert [step for step in range(1, 7) if is_due(step, every)] == due


def test_the_last_step_has_no_evaluation_of_its_own() -> None:
    """The one after training would do the same work a second time."""
    own = config(total_episodes=6 * 8, local_eval_every=2)
    assert own.num_training_steps == 6
    assert [step for step in range(1, 7) if evaluates_after(own, step)] == [2, 4]
