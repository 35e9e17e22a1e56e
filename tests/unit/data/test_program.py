"""The program that tokenizes with several processes: it works beside threads, and ends with whatever goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from mgrpo.data.mixture import open_data
from mgrpo.data.sources import Scale
from tests.unit.data.conftest import sums, user

POOL = Scale(num_proc=2, pool_bytes=0, pool_rows=1)
ENDLESS = "{% for _ in range(100000) %}{% for _ in range(100000) %}{% endfor %}{% endfor %}"
SCRIPT = """
import sys
from mgrpo.config.schema import Data
from mgrpo.data.mixture import open_data
from mgrpo.data.sources import Scale
from mgrpo.data.tokenizer import load_tokenizer
print("the script runs", flush=True)
data = Data(dataset_mixer_list=(sys.argv[1], "1.0"), dataset_local_cache_dir=sys.argv[2])
train, _ = open_data(data, scale=Scale(num_proc=2, pool_rows=1))
tokenizer = load_tokenizer(sys.argv[3])
if len(sys.argv) > 4:
    tokenizer.chat_template = sys.argv[4]
print(len(train.encode(tokenizer)))
"""


def conversations(num_rows: int) -> list[dict]:
    return [{**row, "prompt": [user(row["prompt"])]} for row in sums(num_rows)]


def family(pid: int, num_processes: int) -> list[psutil.Process]:
    """The descendants of a process, once they are that many."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = psutil.Process(pid).children(recursive=True)
        if len(found) >= num_processes:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{pid} has {len(found)} descendants")


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_data_are_prepared_beside_running_threads(settings, write, tokenizer) -> None:
    """Rank 0 runs Ray and threads that hold locks: a fork of it would wait for ever for a lock that nothing releases."""
    lock, done = threading.Lock(), threading.Event()

    def hold() -> None:
        while not done.is_set():
            with lock, open(os.devnull, "w") as file:
                file.write("x" * 1000)

    os.register_at_fork(before=lambda: done.is_set() or pytest.fail("this process was forked"))
    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for name, scale in (("a.jsonl", None), ("b.jsonl", POOL)):
            train, _ = open_data(settings(write(name, conversations(300)), "1.0"), scale=scale)
            assert train.encode(tokenizer).prompt((0, 299)).ground_truths == (299,)
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("whose", ["program", "worker"])
def test_a_process_that_dies_is_reported(settings, write, tokenizer, whose: str) -> None:
    """The kernel kills what takes too much memory; waiting for its answer would last for ever."""
    tokenizer.chat_template = ENDLESS
    train, _ = open_data(settings(write("a.jsonl", conversations(20)), "1.0"), scale=POOL)
    met: list[psutil.Process] = []

    def kill_one() -> None:
        met.extend(family(os.getpid(), 4))
        [program] = psutil.Process().children()
        workers = program.children()
        while whose == "worker" and max(worker.cpu_times().user for worker in workers) < 0.5:
            time.sleep(0.05)
        victim = program if whose == "program" else max(workers, key=lambda worker: worker.cpu_times().user)
        victim.kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    how = "died of SIGKILL" if whose == "program" else "ended with exit code 1"
    with pytest.raises(RuntimeError, match=f"the program that tokenizes {how}; if .* set dataset_num_proc"):
        train.encode(tokenizer)
    killer.join()
    assert_gone(met)


def test_all_processes_end_with_the_run(write, folder: Path, tmp_path: Path) -> None:
    """A run that is killed must not leave processes behind."""
    command = [sys.executable, "-c", SCRIPT, write("a.jsonl", conversations(20)), str(tmp_path / "cache"), str(folder)]
    with subprocess.Popen([*command, ENDLESS]) as run:
        processes = family(run.pid, 4)
        run.kill()
    assert_gone(processes)


def test_a_script_without_a_main_guard_is_run_once(write, folder: Path, tmp_path: Path) -> None:
    """multiprocessing imports the user's script in every process: one that trains would train in each of them."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    if sys.version_info >= (3, 11):  # no earlier Python can be told to leave the working directory out
        (tmp_path / "json.py").write_text("raise RuntimeError('not the json of the standard library')")
    done = subprocess.run(
        [sys.executable, "scripts/script.py", write("a.jsonl", conversations(30)), "cache", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.stdout.splitlines() == ["the script runs", "30"], done.stderr
    assert "tokenizing 30 rows with 2 processes" in done.stderr


def test_a_bug_in_the_program_shows_its_traceback(settings, write, tokenizer, monkeypatch) -> None:
    """Without it there is nothing to mend it by."""
    monkeypatch.setattr("mgrpo.data.building.describe", lambda *_: {"module": "nowhere", "name": "", "folder": ""})
    train, _ = open_data(settings(write("a.jsonl", sums(3)), "1.0"), scale=POOL)
    with pytest.raises(RuntimeError, match=r"ended with exit code 1(.|\n)*Traceback(.|\n)*No module named 'nowhere'"):
        train.encode(tokenizer)
