"""Runs that learn from a teacher: without any reward they come near it, and a death in the middle changes nothing.

The teacher is the model as it was, at a low temperature: its likeliest answers are right, and it samples them one time in three.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.interrupted import Job, metrics, origins, weights
from tests.e2e.launching import ROOT
from tests.e2e.test_asynchronous import FLAGS, STEPS, prompts, untimed

TEACHER = [
    *("--teacher_model_name_or_path", str(ROOT / "examples/quickstart/model"), "--teacher_temperature", "0.2"),
    *("--distillation_only", "true", "--learning_rate", "0.001"),
]  # fmt: skip


@pytest.mark.parametrize("loss", ["sampled", "jsd"])
def test_a_run_without_a_reward_comes_near_its_teacher(tmp_path: Path, loss: str) -> None:
    """A sign that is wrong, a token too far to the right, or a teacher that is trained as well leaves it where it was."""
    lines = metrics(
        Job(flags=[*TEACHER, "--distillation_loss", loss, "--total_episodes", str(30 * 256)]).finish(tmp_path)
    )
    before, after = (line["eval/scores"] for line in lines if "eval/scores" in line)
    distances = [line["distillation/kl"] for line in lines if "distillation/kl" in line]
    assert len(distances) == 30 and all(line.get("distillation/missing", 0) == 0 for line in lines)
    assert before < 0.4 and after > 0.75, (before, after)
    assert sum(distances[-3:]) < 0.5 * sum(distances[:3]), distances


def test_a_run_that_dies_goes_on_with_its_average_of_policies_as_if_it_had_not(tmp_path: Path) -> None:
    """The teacher is part of the state: one that began again from the policy would teach something else."""
    (whole_folder := tmp_path / "whole").mkdir()
    (folder := tmp_path / "dies").mkdir()
    job = Job(
        flags=[
            *FLAGS,
            "--teacher_model_name_or_path",
            "self",
            "--teacher_update_rate",
            "0.1",
            "--distillation_loss",
            "forward_kl",
        ]
    )
    flags = ["--async_steps", "1"]
    whole = job.finish(whole_folder, flags)
    job.fail(folder, flags, fault="kill sync", step=5)
    run = job.finish(folder, flags)
    assert origins(run) == [3]
    ours, theirs = untimed(run), untimed(whole)
    assert ours == theirs and weights(run) == weights(whole)
    distances = [line["distillation/kl"] for line in ours if "distillation/kl" in line]
    assert len(distances) == STEPS and 0 <= distances[0] < 1e-3 < 1e-2 < distances[-1], distances


def test_with_updates_in_flight_every_group_keeps_what_its_teacher_has_said(tmp_path: Path) -> None:
    """Groups that wait are saved with it; those whose answer was under way are asked for again."""
    job = Job(flags=[*FLAGS, *TEACHER, "--teacher_mode", "engine", "--teacher_gpu_memory_utilization", "0.4"])
    flags = ["--async_steps", "2", "--max_staleness", "3", "--inflight_updates", "true"]
    job.fail(tmp_path, flags, fault="kill sync", step=5)
    run = job.finish(tmp_path, flags)
    assert origins(run) == [3]
    counted = prompts(run)
    assert set(counted.values()) == {1} and len(counted) == 16 * STEPS
    steps = [line for line in metrics(run) if "distillation/kl" in line]
    assert all(line["async/age_max"] <= 3 for line in steps)
