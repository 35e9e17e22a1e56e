"""A guard ends what a program has started, whatever ends the program or its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mgrpo.processes.lifetime import children
from tests.processes import processes_with

# It starts a daemon in a session of its own, then does what it is told.
GUARDED = """
import os, signal, subprocess, sys, time
from mgrpo.processes.guarded import go_on_guarded

go_on_guarded()
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
subprocess.run(["setsid", "--fork", "sleep", "4711"], stdout=subprocess.DEVNULL)
print("ready", flush=True)
exec(sys.argv[1])
"""
PARENT = """
import subprocess, sys, time

subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
time.sleep(60)
"""


def gone_within(mark: str, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while processes_with(mark) and time.monotonic() < end:
        time.sleep(0.01)
    return not processes_with(mark)


@pytest.mark.parametrize(
    ("last_words", "code"),
    [
        ("sys.exit(5)", 5),
        ("raise ValueError", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("signal.raise_signal(signal.SIGSEGV)", -signal.SIGSEGV),
        ("pass", 0),
    ],
)
def test_the_guard_ends_as_the_program_did_after_all_that_it_started(last_words: str, code: int) -> None:
    """Its parent reads there how the program ended, and may take the end of its pipe for the end of everything."""
    mark = f"guarded-{os.getpid()}-{code}"
    process = subprocess.Popen(
        [sys.executable, "-c", GUARDED, last_words], stdout=subprocess.PIPE, env=os.environ | {"MARK": mark}
    )
    assert process.stdout is not None
    assert process.stdout.read() == b"ready\n"
    assert processes_with(mark) - {process.pid} == set()
    assert process.wait(5) == code


@pytest.mark.parametrize("state", ["time.sleep(60)", "os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(60)  # guard"])
def test_nothing_outlives_the_parent(state: str) -> None:
    """A program that hangs or is stopped cannot end what it has started, and its guard can."""
    mark = f"guarded-{os.getpid()}-parent"
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, GUARDED, state], stdout=subprocess.PIPE, env=os.environ | {"MARK": mark}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert len(processes_with(mark)) == 4
    (guard,) = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait(5)
    assert gone_within(mark, 5), guard
