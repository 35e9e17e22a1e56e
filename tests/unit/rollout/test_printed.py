"""What engines print is in the run's folder while they live, and its last error is said when one dies."""

from __future__ import annotations

import os
import subprocess
import sys

from mgrpo.rollout.vllm.printed import START, last_error

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from mgrpo.rollout.vllm.printed import print_into

print("before", flush=True)
print_into(Path(sys.argv[1]))
print("of the actor")
os.write(2, b"of a library\\n")
subprocess.run([sys.executable, "-c", "print('of a child')"])
"""


def printed(file) -> str:
    """What reaches the terminal of a process that prints into this file."""
    return subprocess.run([sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True, check=True).stdout


def test_all_that_an_engines_processes_print_is_in_its_file_and_stays(tmp_path):
    """vLLM prints from Python, C++ and other processes; the run is started again after a failure, in the same folder."""
    file = tmp_path / "engine_0.txt"
    for number in (1, 2):
        assert printed(file) == "before\n"
        starts = file.read_text().split(START)
        assert len(starts) == 1 + number and starts[0] == ""
        assert sorted(starts[-1].splitlines()[1:]) == ["of a child", "of a library", "of the actor"]


def test_where_the_runs_folder_is_not_shared_ray_keeps_the_output(tmp_path):
    """A folder of the same name on another node would be found by nobody."""
    assert printed(tmp_path / "missing" / "engine_0.txt") == "before\nof the actor\nof a child\n"
    assert not (tmp_path / "missing").exists()


def test_the_last_error_is_that_of_the_last_file_since_its_start(tmp_path):
    """vLLM's own message says only that there is a stack trace above; errors of an earlier run have had another end."""
    assert last_error(tmp_path) == ""
    first, second = tmp_path / "engine_0.txt", tmp_path / "engine_1.txt"
    first.write_text("ValueError: of another run\n" + START + "process 7\n")
    assert last_error(tmp_path) == f"; what the engines printed is in {tmp_path}"
    second.write_text(START + "\n(EngineCore pid=9) IndexError: index 7 is out of range\nEngineDeadError: see above\n")
    first.write_text(START + "\nKeyError: older\n")
    os.utime(first, (0, 0))
    assert last_error(tmp_path) == (
        "; the last error of the engines' logs: IndexError: index 7 is out of range; "
        f"what the engines printed is in {tmp_path}"
    )
