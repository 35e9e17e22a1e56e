"""What a run keeps besides weights and metrics, and what it does in float16: a run that dies goes on as if it had not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mgrpo.checkpoint.folder import complete
from tests.e2e.interrupted import Job, assert_equal, metrics, origins
from tests.e2e.launching import Run
from tests.tiny_models import load_hf

STEPS = 6
FLAGS = [
    *("--num_unique_prompts_rollout", "16", "--num_samples_per_prompt_rollout", "8", "--total_episodes", str(STEPS * 128)),
    *("--warm_up_steps", "0", "--eval_pass_at_k", "2", "--checkpoint_state_freq", "3"),
]  # fmt: skip
BEST = ["--load_best_model_at_end", "true", "--save_freq", "1", "--local_eval_every", "1"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def whole_and_continued(job: Job, folder: Path, *, fault: str, step: int) -> tuple[Run, Run]:
    """A run that does not die, and one that did and went on from step 3."""
    whole_folder, dying_folder = folder / "whole", folder / "dies"
    whole_folder.mkdir()
    dying_folder.mkdir()
    whole = job.finish(whole_folder)
    job.fail(dying_folder, fault=fault, step=step)
    run = job.finish(dying_folder)
    assert origins(run) == [3]
    return whole, run


def stored(run: Run) -> dict[str, torch.Tensor]:
    """All tensors of the last saved state; of those that lie on several ranks some part."""
    folder = run.output_dir / "checkpoints" / f"step_{complete(run.output_dir / 'checkpoints')[-1]}"
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_points_at_the_best(run: Run) -> None:
    """The earliest of the best evaluations after training began; what it points at is a whole model."""
    scores = {line["step"]: line["eval/scores"] for line in metrics(run) if "eval/scores" in line and line["step"]}
    assert set(scores) == set(range(1, STEPS + 1))
    best = max(scores, key=lambda step: (scores[step], -step))
    folder = run.output_dir / "hf"
    assert json.loads((folder / "best.json").read_text())["value"] == scores[best]
    found, truth = load_hf(folder / "best"), load_hf(folder / f"step_{best}")
    for own, their in zip(found.parameters(), truth.parameters(), strict=True):
        assert torch.equal(own, their)
    assert f"best export: step {best}," in run.text()


def test_a_replay_buffer_and_sets_of_cut_sampling(tmp_path):
    """Groups that wait in the buffer without their sets would be trained on with other ratios."""
    job = Job(flags=[*FLAGS, "--top_k", "8", "--replay_buffer_size", "32"])
    whole, run = whole_and_continued(job, tmp_path, fault="kill forward", step=5)
    assert_equal(run, whole)
    trained = [line for line in metrics(run) if "reward" in line]
    assert any(line["replay/groups"] for line in trained[3:]), "nothing was replayed after the death"
    assert all(1 < line["rollout/kept_tokens_avg"] <= 8 for line in trained)
    kept = {name: value for name, value in stored(run).items() if "kept_sizes" in name}
    assert kept and all(int(value.max()) == 8 for value in kept.values())


def test_a_loss_scale_and_the_best_export(tmp_path):
    """The scale moves in steps that the state must know; the best export may be one of before the death."""
    flags = ["--model_dtype", "float16", "--weight_sync_check_every", "1", "--learning_rate", "0.001"]
    job = Job(flags=[*FLAGS, *BEST, *flags])
    whole, run = whole_and_continued(job, tmp_path, fault="kill forward", step=5)
    assert_equal(run, whole)
    for each in (whole, run):
        assert_points_at_the_best(each)
    trained = [line for line in metrics(run) if "reward" in line]
    assert all(line["policy/loss_scale"] >= 1 for line in trained)
