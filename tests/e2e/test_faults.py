"""Every process killed in turn: the run ends, says why where it can, and leaves nothing behind.

`make test-e2e` runs the first two, `make test-all` the others as well.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.launching import Run, survivors

FLAGS = ["--total_episodes", str(256 * 2000), "--weight_sync_timeout", "20", "--engine_max_restarts", "0"]
KILLED = [
    "engine actor",
    "torchrun",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("rank 0", "rank 1", "raylet", "gcs")),
]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path, FLAGS)
    run.wait_for("\nstep ", 150)
    yield run
    run.end()


@pytest.mark.parametrize("kind", KILLED)
def test_nothing_survives_a_kill(run, kind):
    """kill -9 of any one process: no hang, no orphan, no folder left."""
    family = run.family()
    reaper = next(p for p in family if "mgrpo.rollout.vllm.ray_processes.reaper" in " ".join(p.cmdline()))
    folder = Path(reaper.cmdline()[-1])
    assert folder.is_dir()
    run.find(kind).kill()
    run.wait(60)
    if kind != "torchrun":
        assert run.process.returncode != 0
    assert survivors(family, 30) == []
    assert not folder.exists()
    if kind == "engine actor":
        assert "mgrpo: rank 0: EngineError: could not " in run.text(), run.text()[-3000:]


def test_an_engine_that_dies_before_the_first_step_is_reported(tmp_path):
    """Killed between the first sync and the first evaluation, where nothing has been sampled yet."""
    run = Run(tmp_path, FLAGS)
    try:
        run.wait_for("weight sync: ", 150)
        started = {Path(word).name for process in run.family() for word in process.cmdline()[:4]}
        assert "gcs_server" in started
        assert not started & {"dashboard.py", "monitor.py", "log_monitor.py"}, "a private cluster has no use for them"
        run.find("engine actor").kill()
        assert run.wait(60) != 0
        assert "could not" in run.text()
    finally:
        run.end()


@pytest.mark.slow
def test_a_killed_verifier_is_replaced(run):
    """A verifier dies on hostile input now and then: the run goes on."""
    run.find("verifier").kill()
    time.sleep(5)
    assert run.process.poll() is None
    run.find("verifier")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything(run, number):
    """Ctrl-C reaches the whole process group, a scheduler's SIGTERM only torchrun."""
    family = run.family()
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)
    else:
        run.process.send_signal(number)
    run.wait(40)
    assert survivors(family, 20) == []
