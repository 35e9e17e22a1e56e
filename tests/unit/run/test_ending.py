"""Ctrl-C and errors of a rank, in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from mgrpo.run.ranks.ending import INTERRUPTED

HANGS_IN_ITS_CLEAN_UP = """
import time
from mgrpo.run.ranks import ending

ending.CLEAN_UP_S = 0.5
with ending.bounded(lambda: print("told", flush=True)):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        time.sleep(60)
"""
FAILS = """
from mgrpo.run.ranks import ending

{first}
try:
    raise ValueError("the label is empty")
except ValueError as err:
    ending.report_error(err)
ending.report("too late")
"""


def test_ctrl_c_ends_a_run_whose_clean_up_hangs() -> None:
    """With one sentence: the traceback of a hanging thread helps nobody."""
    command = [sys.executable, "-c", HANGS_IN_ITS_CLEAN_UP]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (INTERRUPTED, "told\n", "mgrpo: interrupted\n")


@pytest.mark.parametrize("first", ["", "ending.silence()"])
def test_the_first_line_is_the_cause_and_a_rank_that_another_has_ended_is_silent(tmp_path, first) -> None:
    """torchrun finds the cause as well, in the file in which it looks for it."""
    file = tmp_path / "error.json"
    environment = {"WORLD_SIZE": "2", "RANK": "1", "TORCHELASTIC_ERROR_FILE": str(file), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", FAILS.format(first=first)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    if first:
        assert ran.stderr == "" and not file.exists()
        return
    lines = ran.stderr.splitlines()
    assert lines[0] == "mgrpo: rank 1: ValueError: the label is empty" and lines[1].startswith("Traceback")
    assert "too late" not in ran.stderr
    assert json.loads(file.read_text())["message"]["message"] == "rank 1: ValueError: the label is empty"


EXITS = """
import os
from mgrpo.run.ranks import ending

def reward():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    os._exit(3)

ending.begin()
before = os._exit
with ending.bounded(print):
    pass
assert os._exit is before
with ending.bounded(lambda: print("left", flush=True)):
    {first}
    reward()
"""


@pytest.mark.parametrize("first", ["pass", "ending.report('another cause')"])
def test_a_run_that_its_reward_function_exits_says_so(tmp_path, first) -> None:
    """Exit code 3 and no sentence would be all that is left of the run; a child that ends so is none of its business."""
    (tmp_path / "train.py").write_text(EXITS.format(first=first))
    ran = subprocess.run([sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 3 and ran.stdout == ("left\n" if first == "pass" else "")
    if first != "pass":
        assert ran.stderr == "mgrpo: another cause\n"
        return
    sentence, *frames = ran.stderr.splitlines()
    assert sentence.startswith("mgrpo: a reward function or other code of yours ended the run by os._exit(3);")
    assert frames[-2:] == [f'  File "{tmp_path}/train.py", line 9, in reward', "    os._exit(3)"]


def test_an_error_of_the_users_code_is_a_sentence_and_its_line() -> None:
    """Ninety lines of this package's frames hid the one line that the user has to change."""
    fails = FAILS.replace("from mgrpo", "from mgrpo.processes.user_code import UserCodeError\nfrom mgrpo", 1)
    fails = fails.replace('ValueError("the label is empty")', 'UserCodeError("reward function f failed", "  line 9")')
    fails = fails.replace("except ValueError", "except UserCodeError").format(first="")
    done = subprocess.run([sys.executable, "-c", fails], capture_output=True, text=True, timeout=60)
    assert done.stderr == "mgrpo: reward function f failed\n  line 9\n"


def test_a_terminal_does_not_obey_what_an_error_quotes() -> None:
    """A reward function's message may hold a completion, and a model can write the sequences that move a cursor."""
    fails = FAILS.format(first="").replace("the label is empty", r"got \x1b[2J\x1b[Hmgrpo: done")
    done = subprocess.run([sys.executable, "-c", fails], capture_output=True, text=True, timeout=60)
    assert "\x1b" not in done.stderr
    assert done.stderr.startswith(r"mgrpo: ValueError: got \x1b[2J")
