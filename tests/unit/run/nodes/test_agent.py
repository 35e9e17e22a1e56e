"""`mgrpo launch` without the training and without Ray: what starts on which node, and how all of them end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[4]

LAUNCH = """
import os, subprocess, sys, threading, time
from mgrpo.run.nodes import agent, launch_command
from mgrpo.run.ranks import local_ranks as ranks

class Ray:
    processes = ()
    def __init__(self, *, address, head, is_head, gpus, num_cpus, token, learners):
        print("ray", address == head.split(":")[0], is_head, num_cpus > 0, len(token), flush=True)
        if "RAY_START_FAILS" in os.environ:
            raise RuntimeError("`ray start` ended with exit code 1")
    def watch(self, on_failure):
        if "RAY_FAILS" in os.environ:
            threading.Timer(0.5, on_failure, ["Ray's raylet (process 7) died of SIGKILL"]).start()
    def keep_logs(self, folder):
        return f"; what the engines printed is in {folder}"
    def close(self):
        print("ray closed", flush=True)

real = subprocess.Popen
ranks.subprocess.Popen = lambda words, **kwargs: real([sys.executable, "-c", sys.argv[1], *words[4:]], **kwargs)
ranks.GRACE_S = agent.GRACE_S = float(os.environ.get("GRACE_S", "2"))
agent.RayNode, agent.serving_gpus = Ray, lambda: []
sys.exit(launch_command.launch_command(sys.argv[2:]))
"""
RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def wait(): time.sleep(60)
"""
UNTIL_THE_END = """
print("ready", flush=True)
while not os.path.exists(sys.argv[sys.argv.index("--output_dir") + 1] + "/end"): time.sleep(0.05)
"""
CONFIG = ("--config", "examples/configs/quickstart.yaml")


class Nodes:
    """Three nodes, of which two train, with one rank each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.head = f"127.0.0.1:{free_port()}"
        self.processes: dict[int, subprocess.Popen] = {}

    def start(
        self, rank: int, program: str, *, words=CONFIG, flags=("--nproc-per-node", "1"), **variables: str
    ) -> None:
        own = ("--nodes", "3", "--learner-nodes", "2", "--node-rank", str(rank), "--head", self.head, *flags)
        command = [sys.executable, "-c", LAUNCH, RANK + program, *own, "--", *words, "--output_dir", str(self.folder)]
        with open(self.folder / f"{rank}.txt", "w") as log:
            self.processes[rank] = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env={"PATH": "/usr/bin:/bin", **variables}
            )

    def start_all(self, program: str, *, words=CONFIG, fails_on: int | None = None, **variables: str) -> None:
        for rank in range(3):
            self.start(rank, program, words=words, **variables, **({"RAY_FAILS": "1"} if rank == fails_on else {}))

    def text(self, rank: int) -> str:
        return (self.folder / f"{rank}.txt").read_text()

    def wait_for(self, words: str, *ranks: int) -> None:
        deadline = time.monotonic() + 60
        while any(words not in self.text(rank) for rank in ranks):
            assert time.monotonic() < deadline, [self.text(rank) for rank in range(3)]
            time.sleep(0.05)

    def codes(self) -> list[int]:
        return [self.processes[rank].wait(60) for rank in sorted(self.processes)]


@pytest.fixture
def nodes(tmp_path) -> Iterator[Nodes]:
    started = Nodes(tmp_path)
    yield started
    for process in started.processes.values():
        process.kill()


def test_learners_and_engines_start_where_they_belong(nodes):
    """Node 0 has the cluster's head, and only its ranks know the token."""
    nodes.start_all("""
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MGRPO_LAUNCHED")
print("rank", *(os.environ[name] for name in names), "MGRPO_STORE_SOCKET" in os.environ, flush=True)
print("token", len(os.environ.get("RAY_AUTH_TOKEN", "")), "joins", "--ray_address" in sys.argv, flush=True)
""")
    assert nodes.codes() == [0, 0, 0], nodes.text(0)
    said = [nodes.text(rank).splitlines() for rank in range(3)]
    assert said[0] == ["ray True True False 64", "rank 0 2 0 1 127.0.0.1 1 True", "token 64 joins True", "ray closed"]
    assert said[1] == ["rank 1 2 0 1 127.0.0.1 1 False", "token 0 joins True"]
    assert said[2] == ["ray True False True 64", "ray closed"]


@pytest.mark.parametrize(
    ("program", "grace_s", "code"),
    [
        ("sys.exit(2) if rank == 0 else wait()", 2, 2),
        ("sys.exit(3) if rank == 1 else wait()", 2, 3),
        ("if rank == 1: sys.exit(3)\ntime.sleep(0.5)", 60, 3),
        ("if rank == 1: sys.exit(3)\ntime.sleep(1)\nsys.exit(1)", 60, 1),
    ],
)
def test_the_end_of_one_is_the_end_of_all_with_one_exit_code(nodes, program, grace_s, code):
    """Rank 0 may end in its own way after another has failed, but it need not."""
    nodes.start_all(program, GRACE_S=str(grace_s))
    assert nodes.codes() == [code] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_the_launcher_of_a_node_that_trains_is_named_when_it_is_killed_and_ends_all(nodes, rank):
    nodes.start_all("print('ready', flush=True)\nwait()")
    nodes.wait_for("ready", 0, 1)
    nodes.processes[rank].kill()
    codes = nodes.codes()
    assert codes.pop(rank) == -9 and codes == [1, 1]
    speakers = (1, 2) if rank == 0 else (0,)
    for speaker in speakers:
        assert f"mgrpo: node {rank}" in nodes.text(speaker) and "has gone: its launcher was killed" in nodes.text(
            speaker
        )


def test_a_node_that_only_serves_may_go(nodes):
    """Its engines are started elsewhere."""
    nodes.start_all(UNTIL_THE_END)
    nodes.wait_for("ready", 0, 1)
    nodes.processes[2].kill()
    nodes.wait_for("has gone: its launcher was killed, or the machine is not reachable; only its engines are lost", 0)
    (nodes.folder / "end").touch()
    assert nodes.codes() == [0, 0, -9]


def test_a_failure_of_ray_on_the_first_node_ends_all(nodes):
    """The engines' errors would only say that an actor has died."""
    nodes.start_all("print('ready', flush=True)\nwait()", fails_on=0)
    assert nodes.codes() == [1, 1, 1]
    assert f"mgrpo: node 0 ({socket.gethostname()}): Ray's raylet (process 7) died of SIGKILL" in nodes.text(0)
    assert f"what the engines printed is in {nodes.folder}/engine_logs/node_2" in nodes.text(2)


def test_a_failure_of_ray_on_a_node_that_only_serves_is_named_and_the_run_goes_on(nodes):
    """Its engines are started elsewhere."""
    nodes.start_all(UNTIL_THE_END, fails_on=2)
    nodes.wait_for(f"mgrpo: node 2 ({socket.gethostname()}): Ray's raylet (process 7) died of SIGKILL; only its", 0)
    (nodes.folder / "end").touch()
    assert nodes.codes() == [0, 0, 0]


def test_rank_0_may_fail_before_the_node_that_is_the_cause_says_so(nodes):
    """It waits for an engine that has died, and ends at once."""
    nodes.start_all("time.sleep(0.2)\nsys.exit(1)", fails_on=2)
    assert nodes.codes() == [1, 1, 1]
    assert "Ray's raylet (process 7) died of SIGKILL" in nodes.text(0)


def test_a_ray_that_does_not_start_is_named_with_its_node(nodes):
    for rank in (0, 1):
        nodes.start(rank, "wait()")
    nodes.start(2, "wait()", RAY_START_FAILS="1")
    assert nodes.codes() == [1, 1, 1]
    assert f"mgrpo: node 2 ({socket.gethostname()}): `ray start` ended with exit code 1" in nodes.text(0)


WITH_CLEAN_END = """
count = 0
def end(number, frame):
    global count
    count += 1
    print("signal", number, count, flush=True)
if rank == 0:
    for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, end)
print("ready", flush=True)
while not count: time.sleep(0.01)
time.sleep(1)
sys.exit(128 + (signal.SIGTERM if count == 1 else signal.SIGKILL))
"""


@pytest.mark.parametrize("to", [(0,), (1,), (2,), (0, 1, 2)])
def test_sigterm_on_any_node_reaches_rank_0_once(nodes, to):
    """It then saves the state; as a second signal it would end at once. Schedulers send it to all nodes."""
    nodes.start_all(WITH_CLEAN_END)
    nodes.wait_for("ready", 0, 1)
    for rank in to:
        nodes.processes[rank].send_signal(signal.SIGTERM)
    assert nodes.codes() == [143, 143, 143]
    assert "signal 15 1\n" in nodes.text(0) and "signal 15 2" not in nodes.text(0)


def test_ctrl_c_on_another_node_ends_all(nodes):
    nodes.start_all("print('ready', flush=True)\nwait()")
    nodes.wait_for("ready", 0, 1)
    nodes.processes[2].send_signal(signal.SIGINT)
    assert nodes.codes() == [130, 130, 130]


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_node_that_waits_for_the_others_can_be_ended(nodes):
    nodes.start(1, "wait()")
    while not catches(nodes.processes[1].pid, signal.SIGTERM):
        time.sleep(0.05)
    nodes.processes[1].send_signal(signal.SIGTERM)
    assert nodes.codes() == [143]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*CONFIG, "--temperature", "-1"), "temperature"),
        ((*CONFIG, "--ray_address", "127.0.0.1:1"), "mgrpo launch starts Ray itself; leave ray_address out"),
        (
            (*CONFIG, "--vllm_mode", "server", "--vllm_server_base_url", "http://127.0.0.1:1"),
            "mgrpo launch starts Ray and engines; start the learners with torchrun instead",
        ),
    ],
)
def test_a_wrong_configuration_ends_all_before_anything_starts(nodes, words, said):
    """One message, by node 0."""
    nodes.start_all("print('ready', flush=True)", words=words)
    assert nodes.codes() == [2, 2, 2]
    assert said in nodes.text(0) and "ray" not in nodes.text(0).split("mgrpo:")[0]
    assert nodes.text(1) == nodes.text(2) == ""


def test_other_arguments_on_one_node_are_refused(nodes):
    for rank in range(3):
        nodes.start(rank, "wait()", words=(*CONFIG, "--seed", str(rank // 2)))
    assert nodes.codes() == [2, 2, 2]
    assert "arguments of the training differs" in nodes.text(0) and "--seed 1" in nodes.text(0)


def test_another_package_on_one_node_is_told_and_the_run_goes_on(nodes, tmp_path):
    """Nodes that were installed on different days differ in some package; a run needs few of them equal."""
    info = tmp_path / "more" / "rich-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rich\nVersion: 0.1\n")
    for rank in range(3):
        nodes.start(rank, "", **({"PYTHONPATH": str(tmp_path / "more")} if rank == 2 else {}))
    assert nodes.codes() == [0, 0, 0]
    note = f"packages on node 2 ({socket.gethostname()}) differ from node 0's: rich 0.1 instead of {version('rich')}"
    assert f"mgrpo: {note}; the run goes on\n" in nodes.text(0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "arguments of the training are missing: expected them after --"),
        (["--node", "2", "--"], "unrecognized arguments: --node 2; see mgrpo launch --help"),
        (["--nodes", "two", "--", *CONFIG], "argument --nodes: invalid int value: 'two'"),
        (["--nodes", "2", "--learner-nodes", "3", "--node-rank", "0", "--head", "a", "--", *CONFIG], "expected 1 to 2"),
        (["--nodes", "1", "--", *CONFIG], "--nproc-per-node is missing"),
    ],
)  # fmt: skip
def test_wrong_flags_are_one_message(flags, said):
    command = [sys.executable, "-m", "mgrpo.cli", "launch", *flags]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
