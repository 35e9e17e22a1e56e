"""The reaper ends what names its folder, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import time

from mgrpo.rollout.vllm.reaper import processes_of

SLEEP = "import time; time.sleep(60)"


def test_processes_of_a_folder_are_found_and_ended(tmp_path):
    """By a name in the command line, or by an open file: Ray's agents rename themselves. Others are left alone."""
    folder = tmp_path / "mgrpo-x"
    folder.mkdir()
    named = subprocess.Popen([sys.executable, "-c", SLEEP, str(folder)])
    holds_file = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=(folder / "log").open("w"))
    other = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        reaper = subprocess.Popen(
            [sys.executable, "-m", "mgrpo.rollout.vllm.reaper", str(folder)], stdin=subprocess.PIPE
        )
        time.sleep(0.5)
        assert set(processes_of(str(folder))) == {named.pid, holds_file.pid, reaper.pid}
        assert named.poll() is None
        reaper.stdin.close()
        assert reaper.wait(20) == 0
        assert named.wait(5) != 0 and holds_file.wait(5) != 0
        assert other.poll() is None
        assert not folder.exists()
    finally:
        for process in (named, holds_file, other):
            process.kill()
