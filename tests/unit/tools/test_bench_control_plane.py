"""tools/bench_control_plane.py at a small size: every group is trained on once, however many engines are killed."""

from __future__ import annotations

import pytest

from tools.bench_control_plane import simulate


@pytest.mark.parametrize("seed", range(3))
def test_no_group_is_lost_or_taken_twice_while_engines_die(seed) -> None:
    """`simulate` counts them itself."""
    found = simulate(40, 640, kills=8, seed=seed)
    assert 0 < found["deaths"] <= 8 and found["groups_again"] > 0


def test_looking_at_every_engine_gives_the_same_groups() -> None:
    """The baseline must be a run that works."""
    assert simulate(10, 160, is_before=True)["groups_again"] == 0
