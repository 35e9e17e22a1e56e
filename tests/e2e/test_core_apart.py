"""An engine as it is on a GPU with one worker: its core in a process of its own, which holds the worker and schedules ahead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.interrupted import metrics, weights
from tests.e2e.launching import Run, survivors

# With stop strings every prompt has a seed of its own, as all have on a GPU: a batch that is cut otherwise changes no sample.
FLAGS = ["--weight_sync_check_every", "1", "--stop_strings", "no such text", "--tensor_model_parallel_size", "1"]
SAMPLES = ["--total_episodes", "1024", "--warm_up_steps", "1", "--local_eval_every", "2"]
STEPS = 4
LIMIT_S = 300
CORE = "VLLM::EngineCore"


@pytest.fixture
def apart(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def started(folder: Path, flags: Sequence[str], program: Sequence[str]) -> Run:
    folder.mkdir()
    return Run(folder, [*FLAGS, *flags], ranks=1, program=program)


def finish(run: Run) -> None:
    """To a good end, with no process left."""
    try:
        run.wait_for("\nstep ", LIMIT_S)
        family = run.family()
        assert run.wait(LIMIT_S) == 0, run.text()[-3000:]
    finally:
        run.end()
    assert survivors(family, 20) == []


def core_of(run: Run) -> psutil.Process:
    return next(process for process in run.family() if CORE in " ".join(process.cmdline()))


def log_of(run: Run) -> str:
    return (run.output_dir / "engine_logs" / "engine_0.txt").read_text()


@pytest.fixture(scope="module")
def within(tmp_path_factory) -> Run:
    """A run with the core in the actor's process."""
    run = started(tmp_path_factory.mktemp("core") / "within", SAMPLES, ("examples/train_grpo.py",))
    finish(run)
    return run


def test_a_core_that_schedules_ahead_samples_the_same(within, apart, tmp_path):
    """Messages that overtake each other, a batch that an update or a sleep finds under way: another token, then another model."""
    turns = ["--vllm_mode", "colocate", "--vllm_enable_sleep_mode", "true"]
    run = started(tmp_path / "apart", [*SAMPLES, *turns], ("tests/e2e/async_engine.py",))
    finish(run)
    assert "EngineCore pid=" not in log_of(within)
    assert "EngineCore pid=" in log_of(run) and "2 batches at a time" in log_of(run)
    # vLLM ignores them on a CPU; their messages travel as on a GPU.
    assert log_of(run).count("to fall asleep") == log_of(run).count("to wake up tags ['weights']") + 1 > STEPS
    assert metrics(run) == metrics(within)
    assert weights(run) == weights(within)


def test_a_core_that_is_killed_in_the_middle_of_completions_is_replaced(apart, tmp_path):
    """Its actor lives on, and the messages to it wait for ever."""
    flags = ["--total_episodes", str(256 * 20), "--async_steps", "1", "--max_staleness", "2"]
    run = started(
        tmp_path / "killed",
        [*flags, "--inflight_updates", "true", "--inflight_kv", "keep"],
        ("tests/e2e/async_engine.py",),
    )
    run.wait_for("\nstep ", LIMIT_S)
    core_of(run).kill()
    finish(run)
    said = run.text()
    assert re.search("mgrpo: engine 0 is dead and is started again: could not [a-z]+: ", said), said[-3000:]
    assert re.search("mgrpo: engine 0 has joined and serves the weights of version ", said), said[-3000:]
    assert len([line for line in metrics(run) if "reward" in line]) == 20
    assert log_of(run).count("mgrpo: engine started: ") == 2
