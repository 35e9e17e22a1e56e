"""Two nodes on one machine, as `mgrpo launch` starts them: two loopback addresses, each with its learner, its Ray and its engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

from tests.e2e.launching import ROOT, Run, survivors

pytestmark = pytest.mark.slow

ADDRESSES = ("127.0.0.2", "127.0.0.3")
"""Not 127.0.0.1, which Ray replaces by the machine's public address."""
ENGINES = ("--vllm_num_engines", "2")


class Nodes:
    """Two launchers, each in a session of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.output_dir = folder, folder / "out"
        # Not a port that the system gives away: Ray listens at the next one, seconds later.
        head = f"{ADDRESSES[0]}:{21000 + 2 * (os.getpid() % 4000)}"
        self.processes = [self._start(rank, head, flags) for rank in (1, 0)][::-1]

    def _start(self, rank: int, head: str, flags: tuple[str, ...]) -> subprocess.Popen:
        command = [
            sys.executable, "-m", "mgrpo.cli", "launch", "--nodes", "2", "--node-rank", str(rank), "--head", head,
            "--nproc-per-node", "1", "--", "--config", "examples/configs/quickstart.yaml",
            "--tensor_model_parallel_size", "2", "--output_dir", str(self.output_dir), *ENGINES, *flags,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        with self.log(rank).open("w") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # With more cores Ray could place both engines on one node.
                preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]),
                env={
                    **environment,
                    "VLLM_HOST_IP": ADDRESSES[rank],
                    "GLOO_SOCKET_IFNAME": "lo",
                    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
                },
            )

    def log(self, rank: int) -> Path:
        return self.folder / f"node{rank}.txt"

    def text(self, rank: int) -> str:
        return self.log(rank).read_text(errors="replace")

    def wait_for(self, words: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while words not in self.text(0):
            assert all(process.poll() is None for process in self.processes), (
                self.text(0)[-3000:] + self.text(1)[-3000:]
            )
            assert time.monotonic() < deadline, self.text(0)[-3000:] + self.text(1)[-3000:]
            time.sleep(0.1)

    def wait(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]

    def family(self, rank: int) -> list[psutil.Process]:
        top = psutil.Process(self.processes[rank].pid)
        return [top, *top.children(recursive=True)]

    def end(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                for member in self.family(rank):
                    member.send_signal(signal.SIGKILL)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Nodes]]:
    started = []

    def go(*flags: str) -> Nodes:
        started.append(Nodes(tmp_path, *flags))
        return started[-1]

    yield go
    for nodes in started:
        nodes.end()


def metrics(folder: Path) -> list[dict]:
    """Every line, clock readings apart."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def weights(folder: Path) -> dict[str, bytes]:
    [file] = (folder / "hf").glob("step_*/model.safetensors")
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name).numpy().tobytes() for name in tensors.keys()}  # noqa: SIM118


def folders(family: list[psutil.Process]) -> list[Path]:
    """Of the nodes' Rays, as their reapers know them."""
    return [Path(p.cmdline()[-1]) for p in family if "mgrpo.rollout.vllm.ray_processes.reaper" in p.cmdline()]


def test_a_run_on_two_nodes_is_the_run_on_one(start, tmp_path):
    """Which machine an engine or a learner is on changes nothing that is computed, to the bit."""
    flags = ("--total_episodes", str(256 * 10), "--resume", "never")
    nodes = start(*flags)
    nodes.wait_for("connecting learners and engines", 300)
    engines = [sum("ray::EngineActor" in " ".join(p.cmdline()) for p in nodes.family(rank)) for rank in (0, 1)]
    assert engines == [1, 1]
    families = [*nodes.family(0), *nodes.family(1)]
    kept = folders(families)
    assert len(kept) == 2
    assert nodes.wait(240) == [0, 0], nodes.text(0)[-3000:] + nodes.text(1)[-3000:]
    assert survivors(families, 5) == [] and not any(folder.exists() for folder in kept)

    (tmp_path / "one").mkdir()
    one = Run(tmp_path / "one", [*ENGINES, *flags], program=None)
    try:
        assert one.wait(300) == 0, one.text()[-3000:]
    finally:
        one.end()
    ours, theirs = metrics(nodes.output_dir), metrics(one.output_dir)
    assert sum("reward" in line for line in ours) == 10
    assert ours == theirs
    assert weights(nodes.output_dir) == weights(one.output_dir)


def kill_raylet(nodes: Nodes) -> str:
    raylet = next(p for p in nodes.family(1) if p.name() == "raylet")
    os.killpg(os.getpgid(raylet.pid), signal.SIGKILL)
    return rf"node 1 \(.*\): Ray's raylet \(process {raylet.pid}\) died of SIGKILL"


def kill_launcher(nodes: Nodes) -> str:
    nodes.processes[1].kill()
    return r"node 1 \(.*\): has gone: its launcher was killed"


def kill_leader(nodes: Nodes) -> str:
    nodes.processes[0].kill()
    return "node 0 has gone: its launcher was killed"


def terminate(nodes: Nodes) -> str:
    nodes.processes[1].terminate()
    return "stopped after step .*; the same command continues from"


@pytest.mark.parametrize(
    ("end", "codes"),
    [(kill_raylet, [1, 1]), (kill_launcher, [1, -9]), (kill_leader, [-9, 1]), (terminate, [143, 143])],
)
def test_the_end_of_a_node_is_the_end_of_all_within_a_minute(start, end, codes):
    """It is named, and nothing is left on either."""
    nodes = start("--total_episodes", str(256 * 2000), "--checkpoint_state_freq", "100000")
    nodes.wait_for("\nstep ", 300)
    families = [*nodes.family(0), *nodes.family(1)]
    kept = folders(families)
    said = end(nodes)
    assert nodes.wait(60) == codes, nodes.text(0)[-3000:] + nodes.text(1)[-3000:]
    speaker = 1 if end is kill_leader else 0
    assert re.search(said, nodes.text(speaker)), nodes.text(speaker)[-3000:]
    assert survivors(families, 40) == []
    deadline = time.monotonic() + 40
    while any(folder.exists() for folder in kept) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(folder.exists() for folder in kept)
    if end is terminate:
        assert any((nodes.output_dir / "checkpoints").glob("step_*"))
