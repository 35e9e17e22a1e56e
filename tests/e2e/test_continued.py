"""What a run keeps besides weights and metrics, and what it does in float16: a run that dies goes on as if it had not."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from mgrpo.checkpoint.folder import complete
from tests.e2e.interrupted import LIMIT_S, Job, assert_equal, metrics, origins
from tests.e2e.launching import Run
from tests.tiny_models import load_hf

STEPS = 6
FLAGS = [
    *("--num_unique_prompts_rollout", "16", "--num_samples_per_prompt_rollout", "8", "--total_episodes", str(STEPS * 128)),
    *("--warm_up_steps", "0", "--eval_pass_at_k", "2", "--checkpoint_state_freq", "3"),
]  # fmt: skip
BEST = [
    *("--load_best_model_at_end", "true", "--metric_for_best_model", "-eval/scores", "--save_freq", "1", "--local_eval_every", "1"),
]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def folders(tmp_path):
    """One for a run that does not die, and one for a run that does."""
    whole, dying = tmp_path / "whole", tmp_path / "dies"
    whole.mkdir()
    dying.mkdir()
    return whole, dying


def stored(run: Run) -> dict[str, torch.Tensor]:
    """All tensors of the last saved state; of those that lie on several ranks some part."""
    folder = run.output_dir / "checkpoints" / f"step_{complete(run.output_dir / 'checkpoints')[-1]}"
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_points_at_the_best(run: Run) -> None:
    """The earliest of the least evaluations after training began, so one of before the death; it is a whole model."""
    scores = {line["step"]: line["eval/scores"] for line in metrics(run) if "eval/scores" in line and line["step"]}
    assert set(scores) == set(range(1, STEPS + 1))
    best = min(scores, key=lambda step: (scores[step], step))
    assert best <= 3
    folder = run.output_dir / "hf"
    pointer = json.loads((folder / "best.json").read_text())
    assert (pointer["step"], pointer["value"]) == (best, scores[best])
    found, truth = load_hf(folder / "best"), load_hf(folder / f"step_{best}")
    for own, their in zip(found.parameters(), truth.parameters(), strict=True):
        assert torch.equal(own, their)
    assert f"best export: step {best}," in run.text()


def test_a_replay_buffer_and_sets_of_cut_sampling(folders):
    """Groups that wait in the buffer without their sets would be trained on with other ratios."""
    job = Job(flags=[*FLAGS, "--top_k", "8", "--replay_buffer_size", "32"])
    whole = job.finish(folders[0])
    job.fail(folders[1], fault="kill forward", step=5)
    run = job.finish(folders[1])
    assert origins(run) == [3]
    assert_equal(run, whole)
    trained = [line for line in metrics(run) if "reward" in line]
    assert any(line["replay/groups"] for line in trained[3:]), "nothing was replayed after the death"
    assert all(1 < line["rollout/kept_tokens_avg"] <= 8 for line in trained)
    kept = {name: value for name, value in stored(run).items() if "kept_sizes" in name}
    assert kept and all(int(value.max()) == 8 for value in kept.values())


def test_a_loss_scale_and_the_best_export(folders):
    """The scale falls once, before the state that is continued. The run dies between two steps."""
    flags = ["--model_dtype", "float16", "--weight_sync_check_every", "1", "--learning_rate", "0.001"]
    job = Job(flags=[*FLAGS, *BEST, *flags])
    whole = job.finish(folders[0], fault="nan once", step=2)
    dead = job.launch(folders[1], fault="nan once", step=2)
    try:
        dead.wait_for("\nevaluation step 4", LIMIT_S)
        dead.find("rank 1").kill()
        assert dead.wait(LIMIT_S) != 0
    finally:
        dead.end()
    run = job.finish(folders[1])
    assert origins(run) == [3]
    assert_equal(run, whole)
    assert [line["policy/loss_scale"] for line in metrics(run) if "reward" in line] == [65536] * 2 + [32768] * 4
    for each in (whole, run):
        assert_points_at_the_best(each)
