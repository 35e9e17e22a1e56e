"""The planner beside what others have measured and published: how far a plan can be trusted."""

from __future__ import annotations

import pytest

from tests.unit.planner.figures.published import FIGURES, Compared, compare_training, mean_error, median_error, of


@pytest.fixture(scope="module")
def found() -> list[Compared]:
    return compare_training()


def test_every_row_has_a_source_and_a_figure() -> None:
    """A figure that nobody can look up proves nothing."""
    assert len({row["id"] for row in FIGURES["rows"]}) == len(FIGURES["rows"])
    for row in FIGURES["rows"]:
        assert row["reported"] and FIGURES["sources"][row["source"]]["address"].startswith("https://"), row["id"]
    assert {row["source"] for row in FIGURES["rows"]} == set(FIGURES["sources"])


def test_training_speed_is_near_what_others_reach(found: list[Compared]) -> None:
    """A suggestion ranks layouts by it."""
    speed = of("tok_s_gpu", found)
    assert len(speed) == 22
    assert mean_error(speed) < 0.35 and abs(median_error(speed)) < 0.05


def test_memory_is_near_what_others_measure(found: list[Compared]) -> None:
    """A run that does not fit costs a start on rented GPUs."""
    assert mean_error(of("mem_gib", found)) < 0.36
