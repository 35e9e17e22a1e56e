"""`mgrpo engines` with a run of scripted engines."""

from __future__ import annotations

import json
import os
import socket

import pytest

from mgrpo.cli import main
from mgrpo.config.schema import Engine as EngineSettings
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.members import State
from mgrpo.rollout.engines.roster import Roster
from mgrpo.run.ranks.engine_requests import NAME, controllable
from tests.scripted_engine import ScriptedEngine


@pytest.fixture
def fleet(tmp_path):
    """Of two engines, which can be asked about in `tmp_path`."""
    engines = [ScriptedEngine() for _ in range(2)]
    own = Roster(engines, EngineSettings(), start=lambda number: ScriptedEngine(hangs="start"), max_restarts=3)
    with controllable(own, tmp_path):
        yield Fleet(own, seed=1)


def test_engines_are_listed_added_and_removed(fleet, tmp_path, capsys) -> None:
    """The capacity of a run may change while it goes on."""
    run = ("--run", str(tmp_path))
    assert main(["engines", "add", *run]) == 0
    assert capsys.readouterr().out == "engine 2 loads its model, and samples after a weight sync\n"
    assert main(["engines", "remove", "0", *run]) == 0
    fleet.roster.lost(1, fleet.engines[1], "killed")
    assert [member.state for member in fleet.members.all] == [State.LEAVING, State.STARTING, State.STARTING]
    capsys.readouterr()
    assert main(["engines", "list", *run]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["engine", "0", "leaving", "starts:", "1"],
        ["engine", "1", "starting", "starts:", "2", "last", "failure:", "killed"],
        ["engine", "2", "starting", "starts:", "1"],
    ]


def test_the_engines_of_teachers_are_listed_with_the_others(fleet, tmp_path, capsys) -> None:
    """A run waits for them as well."""
    teacher = Roster(
        [ScriptedEngine()], EngineSettings(), start=lambda number: ScriptedEngine(), owner="the teacher math"
    )
    fleet.roster.beside = [teacher]
    assert main(["engines", "list", "--run", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "the teacher math's engine 0 serving   starts: 1"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["remove", "7"], "there is no engine 7; choose one of 0, 1"),
        (["remove"], "the following arguments are required: engine; see mgrpo engines --help"),
        (
            ["pause"],
            "argument command: invalid choice: 'pause' (choose from 'list', 'add', 'remove'); see mgrpo engines",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(fleet, tmp_path, capsys, words, sentence) -> None:
    """The run goes on."""
    assert main(["engines", *words, "--run", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err
    assert fleet.members.open == [0, 1]


def test_a_run_that_is_over_or_elsewhere_is_said_so(fleet, tmp_path, capsys) -> None:
    """The folder outlives its run, and is seen from other machines."""
    (other := tmp_path / "other").mkdir()
    record = json.loads((tmp_path / NAME).read_text())
    for changed, words in (
        (None, "no run is going on there"),
        ({"socket": "nobody"}, "the run does not answer: it has ended"),
        ({"socket": "nobody", "host": "node-7"}, f"it runs on node-7, and this is {socket.gethostname()}; ask there"),
    ):
        if changed:
            (other / NAME).write_text(json.dumps(record | changed))
        assert main(["engines", "list", "--run", str(other)]) == 2
        assert words in capsys.readouterr().err


def test_other_users_are_not_answered(fleet, tmp_path, capsys, monkeypatch) -> None:
    """They can see the socket's name if they can read the folder."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert main(["engines", "remove", "0", "--run", str(tmp_path)]) == 2
    assert "does not answer" in capsys.readouterr().err and fleet.members.open == [0, 1]


def test_after_the_run_nothing_is_left(tmp_path) -> None:
    """A later run in the folder has engines of its own."""
    with controllable(Roster([ScriptedEngine()], EngineSettings()), tmp_path):
        assert (tmp_path / NAME).is_file()
    assert not (tmp_path / NAME).exists()
