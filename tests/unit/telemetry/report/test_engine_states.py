"""The states of a thousand engines: what is written and compared grows with the changes, not with the engines times the changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgrpo.telemetry.report import overview
from mgrpo.telemetry.report.run import RecordedRun
from mgrpo.telemetry.state import ENGINES, EngineStates, told_engines
from tests.unit.telemetry.report.runs import step_line, write_lines, write_run

NUM_ENGINES, CHANGES = 1_000, 100


class Counted(dict[str, Any]):
    """A state that counts how often states are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return dict.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


def engine(number: int, state: str = "serving", starts: int = 1, why: str = "") -> dict[str, Any]:
    return {"engine": number, "state": state, "starts": starts, "last_failure": why}


def states_by_step() -> list[list[dict[str, Any]]]:
    """After each step one engine more has failed: 7, 14, 21 ..."""
    present = [engine(number) for number in range(NUM_ENGINES)]
    found = [present]
    for change in range(1, CHANGES + 1):
        present = [*present]
        present[7 * change] = engine(7 * change, "dead", why="no answer")
        found.append(present)
    return found


@pytest.fixture(params=["changes", "all in every line"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RecordedRun:
    """A run of a thousand engines, whose file is as it is now and as earlier versions wrote it."""
    write_run(tmp_path, [step_line(step) for step in range(1, CHANGES + 2)])
    steps = list(enumerate(states_by_step(), start=1))
    if request.param == "changes":
        written = EngineStates(tmp_path)
        for step, states in steps:
            written.write(step, states)
        assert (tmp_path / ENGINES).stat().st_size < 100_000
    else:
        write_lines(tmp_path / ENGINES, [{"step": step, "engines": states} for step, states in steps])
    return RecordedRun.read(tmp_path)


def test_the_page_of_a_thousand_engines_is_bounded(run: RecordedRun) -> None:
    """It is made within a step of training, on rank 0."""
    lines = [
        {name: [*map(Counted, value)] if isinstance(value, list) else value for name, value in line.items()}
        for line in run.engines
    ]
    told = sum(len(told_engines(line)) for line in lines)
    Counted.compared = 0
    html = overview.engines(replace(run, engines=lines))
    assert 0 < Counted.compared <= told
    assert html.count("<svg") == 64 and len(html) < 60_000
    assert "aria-label='states of engine 700 by step'" in html and "states of engine 7 by step" not in html
    assert "states of engine 701 by step" not in html, "an engine that never changed has a bar"
    assert "900 engines serving, 100 engines dead. 936 engines" in html
    assert "The last 64 of 100 failures." in html and html.count("no answer") == 64


def test_both_forms_of_the_file_give_one_page(tmp_path: Path) -> None:
    """A run that was begun by an earlier version goes on in the same file."""
    pages = []
    steps = list(enumerate(states_by_step(), start=1))
    for name, written_whole in (("now", 0), ("before", 40)):
        folder = tmp_path / name
        write_run(folder, [step_line(step) for step in range(1, CHANGES + 2)])
        (folder / ENGINES).touch()
        write_lines(folder / ENGINES, [{"step": step, "engines": states} for step, states in steps[:written_whole]])
        written = EngineStates(folder, resumed_after=written_whole)
        for step, states in steps[written_whole:]:
            written.write(step, states)
        pages.append(overview.engines(RecordedRun.read(folder)))
    assert pages[0] == pages[1]
    last = json.loads((tmp_path / "before" / ENGINES).read_text().splitlines()[-1])
    assert last["changed"] == [engine(700, "dead", why="no answer")]
