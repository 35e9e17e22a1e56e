"""`mgrpo train --nproc-per-node N` without the training: what starts, what ends, and with which exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from mgrpo.config import ConfigError
from mgrpo.run.ranks.local_ranks import num_ranks_of

LAUNCH = """
import signal, subprocess, sys
from mgrpo.run.ranks import local_ranks as ranks

real = subprocess.Popen
ranks.subprocess.Popen = lambda command, **kwargs: real([sys.executable, "-c", sys.argv[1]], **kwargs)
sys.exit(ranks.run_ranks(2, []))
"""
RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, os.environ["OMP_NUM_THREADS"], "MGRPO_STORE_SOCKET" in os.environ, flush=True)
"""


def launch(program: str) -> subprocess.Popen:
    command = [sys.executable, "-c", LAUNCH, RANK + program]
    environment = {"PATH": "/usr/bin:/bin"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("", 0, ""),
        ("if rank == 0: sys.exit(2)\ntime.sleep(60)", 2, ""),
        ("if rank == 1: sys.exit(3)\ntime.sleep(1)", 3, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "died of SIGKILL"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(program, code, words) -> None:
    """Where ranks report their own failure, nothing is added to it."""
    out, err = (launched := launch(program)).communicate(timeout=60)
    assert launched.returncode == code, err
    started = {"rank 0 1 True", "rank 1 1 False"}
    assert set(out.splitlines()) == started if code == 0 else set(out.splitlines()) <= started
    assert words in err and bool(err) == bool(words)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_rank_once(number, code) -> None:
    """Ranks that ignore Ctrl-C are killed; SIGTERM lets rank 0 save its state."""
    ends = f"""
signal.signal({int(number)}, lambda *_: sys.exit({code}))
if rank == 1: signal.signal({int(number)}, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
    launched = launch(ends)
    assert launched.stdout is not None
    while [line.strip() for line in (launched.stdout.readline() for _ in range(4))].count("ready") < 2:
        raise AssertionError("the ranks did not start")
    start = time.monotonic()
    launched.send_signal(number)
    _, err = launched.communicate(timeout=30)
    assert (launched.returncode, err) == (code, "") and time.monotonic() - start < 30


def test_the_number_of_ranks_is_taken_out_of_the_words(monkeypatch) -> None:
    """What is left is the training's; torchrun's spelling with underscores counts as well."""
    monkeypatch.delenv("RANK", raising=False)
    assert num_ranks_of(["--a", "1", "--nproc-per-node", "2", "--b"]) == (2, ["--a", "1", "--b"])
    assert num_ranks_of(["--nproc_per_node=4"]) == (4, [])
    assert num_ranks_of(["--a", "1"]) == (None, ["--a", "1"])
    for words in (["--nproc-per-node"], ["--nproc-per-node", "0"], ["--nproc-per-node", "two"]):
        with pytest.raises(ConfigError, match="is the number of ranks on this machine"):
            num_ranks_of(words)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="leave --nproc-per-node out"):
        num_ranks_of(["--nproc-per-node", "2"])
