"""Asynchronous runs that die and go on: nothing is lost or trained on twice, and a drained one is the run that never died."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.e2e.interrupted import Job, metrics, origins, weights
from tests.e2e.launching import Run

STEPS = 8
FLAGS = [
    *("--num_unique_prompts_rollout", "16", "--num_samples_per_prompt_rollout", "8", "--total_episodes", str(STEPS * 128)),
    *("--use_rho_correction", "true", "--local_eval_every", "4", "--eval_pass_at_k", "2", "--checkpoint_state_freq", "3"),
    *("--save_traces", "true", "--num_mini_batches", "2"),
]  # fmt: skip
JOB = Job(flags=FLAGS)
TIMES = ("async/learner_waited_s", "async/engine_idle_share", "async/admitted")


def untimed(run: Run) -> list[dict]:
    """Every line without what depends on how fast the machine is."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics(run)]


def prompts(run: Run) -> Counter[str]:
    """How often each prompt was trained on, or left out by a step."""
    folder = run.output_dir / "rollouts"
    records = [json.loads(line) for path in sorted(folder.glob("*_rollouts_*.jsonl")) for line in path.open()]
    groups = {(record["step"], record["prompt_id"]) for record in records}
    return Counter(prompt for _, prompt in groups)


@pytest.mark.parametrize(
    ("flags", "step", "ages"),
    [
        (["--async_steps", "1"], 5, [0, *([1] * (STEPS - 1))]),
        # Engines get the weights of steps 3 and 6, and of step 4 for its evaluation.
        (["--async_steps", "1", "--weight_sync_steps", "3"], 6, [0, 1, 2, 3, 1, 1, 2, 1]),
    ],
    ids=["each", "third"],
)
def test_a_drained_run_that_dies_goes_on_as_if_it_had_not(tmp_path, flags, step, ages):
    """The groups of the step ahead were sampled by weights that are gone: without them it would be another run."""
    (whole_folder := tmp_path / "whole").mkdir()
    (folder := tmp_path / "dies").mkdir()
    whole = JOB.finish(whole_folder, flags)
    JOB.fail(folder, flags, fault="kill sync", step=step)
    run = JOB.finish(folder, flags)
    assert origins(run) == [3]
    ours, theirs = untimed(run), untimed(whole)
    assert ours == theirs and weights(run) == weights(whole)
    assert [line["async/age_max"] for line in ours if "async/age_max" in line] == ages
    moved = [line["step"] for line in ours if line.get("sync/bytes")]
    assert moved == ([3, 4, 6, 8] if "--weight_sync_steps" in flags else list(range(1, STEPS + 1)))


def test_with_updates_in_flight_no_prompt_is_lost_or_trained_on_twice(tmp_path):
    """Whatever was under way when the run died."""
    flags = ["--async_steps", "2", "--max_staleness", "3", "--inflight_updates", "true"]
    for place, step in (("generate", 4), ("sync", 6)):
        JOB.fail(tmp_path, flags, fault=f"kill {place}", step=step)
    run = JOB.finish(tmp_path, flags)
    assert origins(run) == [3, 3]
    counted = prompts(run)
    assert set(counted.values()) == {1} and len(counted) == 16 * STEPS
    assert all(line["async/age_max"] <= 3 for line in metrics(run) if "async/age_max" in line)
