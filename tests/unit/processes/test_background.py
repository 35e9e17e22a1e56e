"""Work that may hang neither keeps its process nor is waited for in silence."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from mgrpo.processes.background import Background, announced

HANGS = """
import time
from mgrpo.processes.background import Background

Background("hangs").submit(lambda: time.sleep(600))
print("done")
"""


def test_a_process_ends_although_its_background_work_hangs() -> None:
    """Threads of a pool are joined at the end: a reward function without end would keep the run for ever."""
    ran = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stdout == "done\n"


def test_work_is_done_in_order_and_an_error_is_its_result() -> None:
    background = Background("test")
    done: list[int] = []
    failing = background.submit(lambda: 1 // 0)
    last = [background.submit(lambda n=n: done.append(n)) for n in range(3)][-1]
    assert last.result(10) is None and done == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        failing.result(10)
    name = background.submit(lambda: threading.current_thread().name)
    background.close()
    assert name.result(10) == "test"


def test_what_is_waited_for_is_said_at_growing_intervals(capfd) -> None:
    """A run that waits for an hour without a word looks dead."""
    with announced("engine 0 to generate", "rollout_timeout=3600 s", first_s=0.05):
        time.sleep(0.5)
    with announced("nothing", "no limit"):
        pass
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "mgrpo: waiting for engine 0 to generate since 0.05 s (rollout_timeout=3600 s)"
    assert [line.split(" since ")[1].split(" s")[0] for line in lines[:3]] == ["0.05", "0.1", "0.2"]
    assert len(lines) <= 4
