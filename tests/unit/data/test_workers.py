"""Processes that prepare data: what they are asked and say, and what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgrpo.data.workers import Workers, do_all

SCRIPT = """
import ast, sys
from mgrpo.data.workers import do_all
print("the script runs", flush=True)
tasks = ast.literal_eval(sys.argv[1])
answers = do_all(tasks, here=None, kind="check", num_workers=2, advance=lambda answer: None)
print([answer["num_rows"] for answer in answers])
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def piece(folder: Path, number: int, text: str) -> dict:
    (folder / f"{number}.jsonl").write_text(text)
    return {
        "kind": "jsonl",
        "path": str(folder / f"{number}.jsonl"),
        "start": 0,
        "end": len(text),
        "first": 1,
        "contract": {"need_verifiers": False},
        "out": str(folder / f"{number}.arrow"),
    }


def test_answers_come_in_the_order_of_the_tasks(tmp_path: Path) -> None:
    """Rows that change places lose their labels' index."""
    tasks = [piece(tmp_path, number, '{"prompt": "x"}\n' * number) for number in range(1, 12)]
    seen: list[int] = []
    with Workers(3) as workers:
        pids = [process.pid for process in workers._processes]
        answers = workers.map([{"check": task} for task in tasks], lambda answer: seen.append(answer["num_rows"]))
    assert [answer["num_rows"] for answer in answers] == list(range(1, 12)) and sorted(seen) == list(range(1, 12))
    assert not any(is_alive(pid) for pid in pids)


def test_an_error_of_a_worker_is_raised_and_ends_the_others(tmp_path: Path) -> None:
    """A user's mistake is a ValueError wherever it is found; a bug shows its traceback."""
    good = piece(tmp_path, 0, '{"prompt": "x"}\n')
    refused = {**good, "kind": "parquet", "row_groups": [0]}
    for task, error, words in (
        (refused, ValueError, "0.jsonl cannot be read as parquet"),
        ({"kind": "jsonl"}, RuntimeError, "failed:\nTraceback(.|\n)*KeyError"),
    ):
        with pytest.raises(error, match=words):
            do_all([task, *[good] * 50], here=None, kind="check", num_workers=2, advance=lambda answer: None)


def test_a_worker_that_dies_is_reported(tmp_path: Path) -> None:
    """The kernel kills what takes too much memory; waiting for its answer would last for ever."""
    tasks = [{"check": piece(tmp_path, number, '{"prompt": "x"}\n')} for number in range(4)]
    with Workers(2) as workers:
        os.kill(workers._processes[0].pid, signal.SIGKILL)
        workers._processes[0].wait()
        with pytest.raises(RuntimeError, match="died of SIGKILL; if the machine ran out of memory"):
            workers.map(tasks, lambda answer: None)


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """A run that is killed must not leave processes behind that nobody waits for."""
    code = """
import time
from mgrpo.data.workers import Workers
workers = Workers(2)
workers.map([{"check": None}] * 0, print)
print(*[process.pid for process in workers._processes], flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def test_a_script_without_a_main_guard_is_run_once(tmp_path: Path) -> None:
    """multiprocessing imports the user's script in every process: one that trains would train in each of them."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    if sys.version_info >= (3, 11):  # no earlier Python can be told to leave the working directory out
        (tmp_path / "json.py").write_text("raise RuntimeError('not the json of the standard library')")
    tasks = [piece(tmp_path, number, '{"prompt": "x"}\n' * number) for number in (3, 4)]
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "scripts/script.py", repr(tasks)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert done.stdout.splitlines() == ["the script runs", "[3, 4]"], done.stderr
