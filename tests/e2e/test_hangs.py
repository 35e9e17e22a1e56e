"""What hangs is named within the time that a setting gives, and Ctrl-C ends every phase; started by `mgrpo train`."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.launching import Run, survivors

pytestmark = pytest.mark.slow

FOREVER = """
import time

def forever(completions, **kwargs):
    print("scoring", flush=True)
    time.sleep(3600)
"""
LOOP = """
import os

def loop(inputs):
    while os.environ["RANK"] == "1":
        pass
    return (inputs.logprobs * inputs.advantages).sum()
"""


@pytest.fixture
def start(tmp_path):
    """Start one run with these flags."""
    runs = []

    def go(*flags: str) -> Run:
        runs.append(Run(tmp_path, ["--total_episodes", str(256 * 2000), *flags], program=None))
        return runs[-1]

    yield go
    for run in runs:
        run.end()


def first_cause(run: Run) -> str:
    """What is said first after the start, apart from what is waited for."""
    lines = run.text().partition("starting Ray")[2].splitlines()
    return next(line for line in lines if line.startswith("mgrpo: ") and "waiting" not in line)


@pytest.mark.parametrize("kind", ["rank 0", "rank 1", "raylet"])
def test_a_stopped_process_is_named(start, kind):
    """SIGSTOP, as a debugger or a full machine does it."""
    run = start("--learner_timeout", "60")
    run.wait_for("\nstep ", 240)
    family, stopped = run.family(), run.find(kind)
    stopped.suspend()
    assert run.wait(120) != 0
    name = f"{kind} (process {stopped.pid}" if "rank" in kind else f"raylet (process {stopped.pid})"
    assert name in first_cause(run), run.text()[-3000:]
    assert survivors(family, 30) == []


@pytest.mark.parametrize("kind", ["rank 0", "rank 1", "raylet", "gcs"])
def test_a_killed_process_is_named_first(start, kind):
    """What follows from its end, such as a broken connection, comes after, if at all."""
    run = start()
    run.wait_for("\nstep ", 240)
    family, killed = run.family(), run.find(kind)
    reaper = next(p for p in family if "mgrpo.rollout.vllm.ray_processes.reaper" in " ".join(p.cmdline()))
    folder = Path(reaper.cmdline()[-1])
    reaper.kill()
    time.sleep(3)
    killed.kill()
    assert run.wait(60) not in (0, None)
    assert str(killed.pid) in first_cause(run), run.text()[-3000:]
    assert survivors(family, 30) == []
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists()


def test_a_rank_in_an_endless_loop_is_named(start, tmp_path):
    """Here in a user's loss; the others wait for it in a collective."""
    (tmp_path / "losses.py").write_text(LOOP)
    run = start("--policy_loss", f"{tmp_path}/losses.py:loop", "--learner_timeout", "60")
    assert run.wait(300) == 1
    cause = first_cause(run)
    assert "rank 1 has made no progress within learner_timeout=60 s" in cause and "losses.py:" in cause


def test_a_reward_function_that_hangs_is_named(start, tmp_path):
    (tmp_path / "rewards.py").write_text(FOREVER)
    run = start("--reward_funcs", f"{tmp_path}/rewards.py:forever", "--reward_funcs_timeout", "5")
    assert run.wait(300) == 1
    assert "reward function forever has not returned within reward_funcs_timeout=5 s" in first_cause(run)


@pytest.mark.parametrize("phase", ["starting", "scoring", "step"])
def test_ctrl_c_ends_every_phase_with_one_sentence(start, tmp_path, phase):
    """At the start the main thread is inside Ray; a reward function may hang."""
    (tmp_path / "rewards.py").write_text(FOREVER)
    run = start(*(("--reward_funcs", f"{tmp_path}/rewards.py:forever") if phase == "scoring" else ()))
    if phase == "starting":
        time.sleep(4)
    else:
        run.wait_for({"scoring": "scoring", "step": "\nstep "}[phase], 240)
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    last = run.text().splitlines()[-1]
    said = re.fullmatch(
        r"mgrpo: interrupted( after step \d+; no state was saved, so the same command begins again)?", last
    )
    assert said and bool(said[1]) == (phase != "starting") and "Traceback" not in run.text()
    assert survivors(family, 20) == []
