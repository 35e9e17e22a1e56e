"""Two nodes on one machine, as `mgrpo launch` starts them: two loopback addresses."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.interrupted import assert_equal, metrics
from tests.e2e.launching import Run, survivors
from tests.e2e.nodes import Nodes

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Nodes]]:
    started = []

    def go(*flags: str) -> Nodes:
        started.append(Nodes(tmp_path, *flags))
        return started[-1]

    yield go
    for nodes in started:
        nodes.end()


def folders(family: list[psutil.Process]) -> list[Path]:
    """Of the nodes' Rays, as their reapers know them."""
    return [Path(p.cmdline()[-1]) for p in family if "mgrpo.rollout.vllm.ray_processes.reaper" in p.cmdline()]


def test_a_run_on_two_nodes_is_the_run_on_one(start, tmp_path):
    """Which machine an engine or a learner is on changes nothing that is computed, to the bit."""
    flags = ("--total_episodes", str(256 * 10), "--resume", "never")
    nodes = start(*flags)
    nodes.wait_for("connecting learners and engines", 300)
    assert nodes.engine(0) != nodes.engine(1)
    families = [*nodes.family(0), *nodes.family(1)]
    kept = folders(families)
    assert len(kept) == 2
    assert nodes.wait(240) == [0, 0], nodes.ends()
    assert survivors(families, 5) == [] and not any(folder.exists() for folder in kept)

    (tmp_path / "one").mkdir()
    one = Run(tmp_path / "one", ["--vllm_num_engines", "2", *flags], program=None)
    try:
        assert one.wait(300) == 0, one.text()[-3000:]
    finally:
        one.end()
    assert sum("reward" in line for line in metrics(nodes)) == 10
    assert_equal(nodes, one)


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
    assert nodes.wait(60) == codes, nodes.ends()
    speaker = 1 if end is kill_leader else 0
    assert re.search(said, nodes.text(speaker)), nodes.text(speaker)[-3000:]
    assert survivors(families, 40) == []
    deadline = time.monotonic() + 40
    while any(folder.exists() for folder in kept) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(folder.exists() for folder in kept)
    if end is terminate:
        assert any((nodes.output_dir / "checkpoints").glob("step_*"))
