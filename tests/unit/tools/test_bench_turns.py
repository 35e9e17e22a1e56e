"""What tools/bench_turns.py compares: as many sampled tokens, with the environments' answers between them or without."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        yield importlib.import_module("bench_turns")


def test_a_ratio_above_one_is_the_price_of_turns(bench: ModuleType) -> None:
    seconds = {"one turn": [2.0, 1.0, 9.0], "rounds": [3.0, 3.0, 3.0]}
    one, rounds = bench.compared(seconds, {"one turn": [1.0], "rounds": [4.0]}, tokens=60)
    assert (one["times_one_turn"], one["sampled_tokens_per_s"]) == (1.0, 30.0)
    assert (rounds["times_one_turn"], rounds["cpu_times_one_turn"]) == (1.5, 4.0)


def test_calls_of_workers_are_answered_and_cost_more_than_the_function(bench: ModuleType) -> None:
    """A row of calls that failed would look fast."""
    rows = bench.measure_workers(argparse.Namespace(trajectories=8, calls=2, repeat=1))
    assert [row["where"] for row in rows] == ["in process", "1 worker", "2 workers"]
    assert all(0 < row["calls_per_s"] < rows[0]["calls_per_s"] and row["overhead_ms"] > 0 for row in rows[1:])
