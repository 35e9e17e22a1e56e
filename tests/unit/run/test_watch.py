"""Ranks that hang or die are named by the others; with real processes, since stopped ones are the subject."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgrpo.run.ranks.liveness import WAITING

RANK = """
import select, sys, threading, time
from mgrpo.run.ranks import liveness as module
from mgrpo.run.ranks.liveness import Liveness

module.BEAT_S, module.SILENCE_S = 0.1, 2.0
rank, timeout_s, task = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
said = threading.Event()

def say(reason):
    print("failure:", reason, flush=True)
    said.set()

def goodbye():
    print("goodbye", flush=True)
    said.set()

watch = Liveness(rank=rank, world_size=3, timeout_s=timeout_s, on_failure=say, on_goodbye=goodbye)
if rank == 0:
    print(watch.listen("127.0.0.1"), flush=True)
else:
    watch.connect(sys.stdin.readline())
watch.pulse.at("step 4, training")
print("here", flush=True)
while not select.select([sys.stdin], [], [], 0.05)[0]:
    watch.pulse.go_on()  # until all are here

def caught_in_a_loop():
    while not said.is_set():
        time.sleep(0.05)

def in_a_collective():  # as if its module were torch's
    code = compile("while not said.is_set(): time.sleep(0.05)", "torch/distributed/distributed_c10d.py", "exec")
    exec(code, {"said": said, "time": time, "__name__": "torch.distributed.distributed_c10d"})

def breaks():
    watch.pulse.state = lambda: 1 / 0
    works()

def works():
    while not said.is_set():
        watch.pulse.go_on()
        time.sleep(0.05)

if task == "leaves":
    watch.leave(is_failing=True)
elif task == "ends well":
    watch.leave(is_failing=False)
    time.sleep(1.0)
else:
    globals()[task]()
time.sleep(0.5)
"""


class Ranks:
    """Three processes that watch each other."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []

    def start(self, tasks: list[str], *, timeout_s: float = 60.0) -> None:
        invitation = ""
        for rank, task in enumerate(tasks):
            command = [sys.executable, "-c", RANK, str(rank), str(timeout_s), task]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.processes.append(process)
            if rank == 0:
                invitation = process.stdout.readline()
        for process in self.processes[1:]:
            process.stdin.write(invitation)
            process.stdin.flush()
        for process in self.processes:
            assert process.stdout.readline() == "here\n"
        time.sleep(0.3)  # for the last greeting to arrive
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        self.invitation = json.loads(invitation)

    def said(self, rank: int) -> str:
        return self.processes[rank].stdout.readline().strip()


@pytest.fixture
def ranks():
    own = Ranks()
    yield own
    for process in own.processes:
        process.kill()
        process.wait()


def test_a_stopped_rank_is_named_and_killed(ranks) -> None:
    """Its place is the last that it told; a launcher would wait for it."""
    ranks.start(["works", "works", "works"])
    stopped = ranks.processes[2]
    stopped.send_signal(signal.SIGSTOP)
    said = ranks.said(0)
    assert said.startswith(
        f"failure: rank 2 (process {stopped.pid} on {socket.gethostname()}) has not answered for 2 s"
    )
    assert "step 4, training" in said
    assert stopped.wait(10) == -signal.SIGKILL
    assert ranks.said(1) == "goodbye"


def test_a_stopped_rank_0_is_named_by_the_others(ranks) -> None:
    ranks.start(["works", "works", "works"])
    ranks.processes[0].send_signal(signal.SIGSTOP)
    assert f"rank 0 (process {ranks.processes[0].pid} on" in ranks.said(1)
    assert ranks.processes[0].wait(10) == -signal.SIGKILL


def test_a_rank_in_an_endless_loop_is_named_and_those_that_wait_for_it_are_not(ranks) -> None:
    """All of them stand still; only one of them is not inside a collective."""
    ranks.start(["in_a_collective", "caught_in_a_loop", "in_a_collective"], timeout_s=1.5)
    said = ranks.said(0)
    assert said.startswith("failure: rank 1 has made no progress within learner_timeout=1.5 s: rank 1 (process")
    assert "is in step 4, training, <string>:" in said and "caught_in_a_loop" in said and "rank 2" not in said


def test_a_killed_rank_is_named_at_once_and_one_that_says_why_it_ends_is_not(ranks) -> None:
    """A rank that ends well, or reports its own error, has nothing that others could say better."""
    ranks.start(["works", "ends well", "works"])
    ranks.processes[2].kill()
    assert "rank 2 (process" in (said := ranks.said(0)) and "has ended without a word, as if killed" in said
    others = Ranks()
    try:
        others.start(["works", "leaves", "works"])
        assert others.said(0) == "goodbye"
    finally:
        for process in others.processes:
            process.kill()


def test_a_stranger_at_the_door_changes_nothing(ranks) -> None:
    """The port is open to every process of the machine; tests of `TcpLinks` say what a stranger can do at most."""
    ranks.start(["works", "works", "works"])
    host, port, _ = ranks.invitation
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"hello": "guess", "rank": 1}\n',
        b'{"bye": true}\n',
        b"[" * 200_000 + b"\n",
    ):
        with socket.create_connection((host, port)) as link, contextlib.suppress(ConnectionError):
            link.sendall(words)
    time.sleep(0.5)
    ranks.processes[1].kill()
    assert "rank 1 (process" in ranks.said(0)


def test_a_watch_that_fails_says_so_itself(ranks) -> None:
    """Else the others name this rank 50 s later as one that hangs."""
    ranks.start(["breaks", "works", "works"])
    assert ranks.said(0).startswith("failure: the watch of rank 0 has failed: ZeroDivisionError")
    assert ranks.said(1) == "goodbye"


@pytest.mark.parametrize("name", WAITING)
def test_the_modules_that_wait_for_other_ranks_exist(name) -> None:
    """A rank that waits in one that has been renamed counts as one that hangs."""
    package, *parts = name.split(".")
    found = importlib.util.find_spec(package)  # of the package alone: nothing is imported
    assert any(Path(place, *parts).with_suffix(".py").is_file() for place in found.submodule_search_locations)
