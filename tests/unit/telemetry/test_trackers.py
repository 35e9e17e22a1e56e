"""Trackers that are other packages: the real wandb and trackio, without an account or a network."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mgrpo.processes.lifetime import children
from mgrpo.telemetry.metrics.writer import MetricsWriter
from mgrpo.telemetry.trackers import tracker, trackio, wandb
from mgrpo.telemetry.trackers.process import Tracker, TrackerLimits
from mgrpo.telemetry.trackers.sinks import Table
from tests.unit.telemetry.wandb_file import history, offline_runs, records, run, values

HOSTILE = "<b>\x1b[31m[red]"
TABLE = Table(name="samples", columns=("completion", "reward"), rows=((HOSTILE, 1.0), ("?", None)))


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path) -> None:
    """Nobody is logged in, and no server is asked."""
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


def opening(folder: Path) -> dict[str, object]:
    return {
        "folder": str(folder),
        "id": "abcd1234",
        "name": "mine",
        "project": "sums",
        "entity": "team",
        "group": "tries",
        "config": {"learning_rate": 1e-6, "tools": ["a", "b"], "seed": None},
        "tags": ["grpo"],
    }


@contextmanager
def heard(name: str, options: dict[str, object], **settings: Any) -> Iterator[tuple[Tracker, list[str], list[str]]]:
    """A tracker, what it says and what it warns of; further settings are those of `Tracker`."""
    said: list[str] = []
    warned: list[str] = []

    def say(line: str) -> None:
        if not line.startswith("waiting up to"):  # on a slow machine
            said.append(line)

    tracker = Tracker(name, options, say=say, warn=warned.append, **settings)
    try:
        yield tracker, said, warned
    finally:
        tracker.close(wait_s=0.0)


def descendants(pid: int) -> set[int]:
    found = set(children(pid))
    return found.union(*map(descendants, found))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended(pids: set[int]) -> None:
    """By themselves, in bounded time."""
    deadline = time.monotonic() + tracker.LAST_S + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, pids))


def test_an_offline_run_of_wandb_holds_what_the_run_reported(tmp_path) -> None:
    """Curves that differ from metrics.jsonl are worse than none; steps, evaluations, settings, samples and who owns it."""
    with heard("wandb", opening(tmp_path)) as (tracker, said, warned):
        tracker.write(0, {"eval/scores": 0.25})
        for step in range(1, 6):
            tracker.write(step, {"reward": step / 4, "loss/policy_avg": -1.5})
        tracker.table(5, TABLE)
        tracker.write(5, {"eval/scores": 0.5})
        tracker.summary({"before/eval/scores": 0.25})
        tracker.close(wait_s=60)
    (path,) = offline_runs(tmp_path)
    rows = {row["_step"]: row for row in history(path)}
    assert list(rows) == [0, 1, 2, 3, 4, 5]
    assert [rows[step].get("reward") for step in rows] == [None, 0.25, 0.5, 0.75, 1.0, 1.25]
    assert (rows[0]["eval/scores"], rows[5]["eval/scores"], rows[5]["loss/policy_avg"]) == (0.25, 0.5, -1.5)
    own = run(path)
    assert (own.run_id, own.display_name, own.project, own.entity, own.run_group) == (
        "abcd1234", "mine", "sums", "team", "tries"
    )  # fmt: skip
    config = {name: value for name, value in values(own.config.update).items() if name != "_wandb"}
    assert config == {"learning_rate": 1e-6, "tools": ["a", "b"], "seed": None} and list(own.tags) == ["grpo"]
    summaries = [values(record.summary.update) for record in records(path) if record.HasField("summary")]
    assert any(found.get("before/eval/scores") == 0.25 for found in summaries)
    (table,) = (path.parent / "files" / "media" / "table").rglob("samples*.json")
    assert '"columns": ["completion", "reward"]' in table.read_text().replace('":[', '": [').replace('","', '", "')
    assert "u001b[31m[red]" in table.read_text()
    assert said == [f"wandb    offline; upload it with: wandb sync {path.parent}"] and not warned
    assert not list((tmp_path / "tmp").iterdir())


def test_a_continued_run_keeps_its_id_and_goes_up(tmp_path) -> None:
    """`wandb sync` uploads all folders of an id into one run, in the order in which they began."""
    for first in (1, 3):
        began = int(time.time())
        with heard("wandb", opening(tmp_path)) as (tracker, _, warned):
            for step in range(first, first + 4):
                tracker.write(step, {"reward": float(step)})
            tracker.close(wait_s=60)
            assert not warned
        while int(time.time()) == began:  # folders are named by the second
            time.sleep(0.05)
    paths = offline_runs(tmp_path)
    assert [run(path).run_id for path in paths] == ["abcd1234"] * 2
    assert [[row["_step"] for row in history(path)] for path in paths] == [[1, 2, 3, 4], [3, 4, 5, 6]]


def test_no_process_is_left_when_the_run_ends_or_is_killed(tmp_path) -> None:
    """wandb starts programs in sessions of their own; and what a killed run had reported must still be on disk."""
    script = f"""
import sys, time
from mgrpo.telemetry.trackers.process import Tracker
tracker = Tracker("wandb", {opening(tmp_path)!r}, say=lambda line: print(line, flush=True))
for step in range(50):
    tracker.write(step, {{"reward": step / 4}})
while not tracker.where:
    tracker.write(step, {{}})
    time.sleep(0.1)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and "wandb sync" in owner.stdout.readline()
    started = descendants(owner.pid)
    assert len(started) >= 2
    owner.kill()
    owner.wait()
    assert_ended(started)
    (path,) = offline_runs(tmp_path)
    assert [row["_step"] for row in history(path)] == list(range(50))


def test_a_tracker_that_dies_is_warned_of_once(tmp_path) -> None:
    """The run is worth more than its curves."""
    with heard("wandb", opening(tmp_path)) as (tracker, _, warned):
        child = tracker._child.process.pid
        while not tracker.where:
            tracker.write(1, {"reward": 1.0})
            time.sleep(0.1)
        started = descendants(child)
        os.kill(child, signal.SIGKILL)
        for step in range(2, 100):
            tracker.write(step, {"reward": 1.0})
            time.sleep(0.01)
        tracker.close(wait_s=5)
    assert warned == ["wandb died of SIGKILL; the run goes on without it; metrics.jsonl has everything"]
    assert_ended(started)


def test_a_value_that_wandb_refuses_is_warned_of_once(tmp_path) -> None:
    with heard("wandb", opening(tmp_path)) as (tracker, _, warned):
        tracker.table(1, Table(name="broken", columns=("a", "b"), rows=((1.0,),)))
        for step in range(2, 5):
            tracker.write(step, {"reward": 1.0})
        tracker.close(wait_s=30)
    assert len(warned) == 1 and warned[0].startswith("wandb failed: ")


@contextmanager
def silent_server() -> Iterator[int]:
    """Takes every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def test_a_server_that_does_not_answer_holds_nothing_up(tmp_path, monkeypatch) -> None:
    """Steps must not wait for a network; the end of the run does, for as long as it says."""
    with silent_server() as port:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        with heard("wandb", opening(tmp_path), limits=TrackerLimits(last_s=1.0)) as (tracker, _, warned):
            slowest = 0.0
            for step in range(200):
                began = time.monotonic()
                tracker.write(step, {f"metric/{number}": float(step) for number in range(100)})
                slowest = max(slowest, time.monotonic() - began)
            started = {tracker._child.process.pid} | descendants(tracker._child.process.pid)
            began = time.monotonic()
            tracker.close(wait_s=1)
            took = time.monotonic() - began
            assert_ended(started)
    assert slowest < 0.5 and took < 5
    assert warned == ["wandb has not finished within 1 s, and has 1 s more; metrics.jsonl has everything"]


def test_a_server_that_cannot_be_reached_makes_the_run_an_offline_one(tmp_path, monkeypatch) -> None:
    """What was reported can still be uploaded; a run of days would have no curves else."""
    with silent_server() as port:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
        with heard("wandb", opening(tmp_path)) as (tracker, said, warned):
            tracker.write(1, {"reward": 0.5})
            tracker.close(wait_s=60)
    assert "recording offline, because the server cannot be used" in warned[0] and "wandb sync" in said[0]
    (path,) = offline_runs(tmp_path)
    assert [row["reward"] for row in history(path)] == [0.5]


def test_a_disabled_run_writes_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with heard("wandb", opening(tmp_path)) as (tracker, said, warned):
        tracker.write(1, {"reward": 0.5})
        tracker.table(1, TABLE)
        tracker.close(wait_s=30)
    assert said == ["wandb disabled (WANDB_MODE)"] and not warned and not offline_runs(tmp_path)


def test_a_missing_login_is_found_without_asking(monkeypatch) -> None:
    """wandb would ask on the terminal, and a job in a queue would wait for an answer."""
    assert wandb.problem() is None
    monkeypatch.setenv("WANDB_MODE", "online")
    assert "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline" in str(wandb.problem())
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert wandb.problem() is None


@pytest.mark.parametrize("tracker", [wandb, trackio])
def test_a_missing_package_is_named(tracker, monkeypatch) -> None:
    monkeypatch.setattr(tracker, "PACKAGE", "no_such_package")
    assert f"pip install {tracker.__name__.rpartition('.')[2]}" in str(tracker.problem())


def test_trackio_holds_what_the_run_reported(tmp_path) -> None:
    """A continued run goes on with the steps that it has not done yet."""
    pytest.importorskip("trackio")
    options = {"folder": str(tmp_path / "trackio"), "name": "mine", "project": "sums", "group": None}
    for is_continued, steps in ((False, (1, 2, 3)), (True, (3, 4))):
        with heard("trackio", options | {"config": {"seed": 1}, "is_continued": is_continued}) as (
            tracker,
            said,
            warned,
        ):
            for step in steps:
                tracker.write(step, {"reward": step / 4})
            tracker.table(3, TABLE)
            tracker.close(wait_s=60)
        assert not warned and said == [f"trackio  TRACKIO_DIR={tmp_path}/trackio trackio show --project sums"]
    script = """
import json
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps([[row["step"], row["reward"]] for row in SQLiteStorage.get_logs("sums", "mine") if "reward" in row]))
"""
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},
        capture_output=True,
        text=True,
    )
    assert json.loads(shown.stdout) == [[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]], shown.stderr


def test_a_run_that_cannot_wait_loses_nothing(tmp_path) -> None:
    """A run that is stopped in its first seconds, before wandb has begun, has reported all the same."""
    with heard("wandb", opening(tmp_path)) as (tracker, _, warned):
        started = {tracker._child.process.pid}
        for step in range(20):
            tracker.write(step, {"reward": 1.0})
        tracker.close(wait_s=0.0)
        assert_ended(started)
    (path,) = offline_runs(tmp_path)
    assert [row["_step"] for row in history(path)] == list(range(20)) and len(warned) == 1


def test_trackers_finish_at_the_same_time(tmp_path) -> None:
    """One that uses up the time to send would leave none to the next, which has recorded everything."""
    others = list[int]()

    def clock() -> float:
        """All the time is over as soon as the other tracker has finished, and not before."""
        return time.monotonic() + (0.0 if any(map(is_alive, others)) else 15.0)

    with (
        MetricsWriter(tmp_path, clock=clock) as writer,
        heard("wandb", opening(tmp_path)) as (tracker, _, warned),
        heard("wandb", opening(tmp_path), limits=TrackerLimits(silent_s=0.1), clock=clock) as (stuck, _, complaints),
    ):
        others.append(tracker._child.process.pid)
        writer.sinks += [stuck, tracker]
        writer.write(1, {"reward": 1.0})
        while not tracker.where:
            tracker.write(1, {})
            time.sleep(0.1)
        child = stuck._child.process.pid
        os.kill(child, signal.SIGSTOP)
        writer.close(wait_s=15)
        os.kill(child, signal.SIGCONT)
        assert_ended({child})
    assert len(complaints) == 1 and "has not finished within 15 s" in complaints[0] and not warned


def test_a_tracker_that_never_answers_is_given_up(tmp_path) -> None:
    """Its messages would fill the memory of a run of weeks."""
    with heard("wandb", opening(tmp_path), limits=TrackerLimits(unanswered=10)) as (tracker, _, warned):
        os.kill(tracker._child.process.pid, signal.SIGSTOP)
        for step in range(20):
            tracker.write(step, {})
    assert warned == ["wandb has not answered 10 messages; the run goes on without it; metrics.jsonl has everything"]
