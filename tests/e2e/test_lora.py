"""Runs with adapters: trainer, engine, export and reference are the policies they should be, also after a death."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from mgrpo.checkpoint.folder import complete
from tests.e2e.interrupted import Job, assert_equal, export, metrics, origins
from tests.tiny_models import load_hf

STEPS = 6
JOB = Job(
    config="quickstart_lora",
    flags=[
        *("--num_unique_prompts_rollout", "16", "--num_samples_per_prompt_rollout", "8", "--total_episodes", str(STEPS * 128)),
        *("--beta", "0.05", "--warm_up_steps", "0", "--lr_scheduler_type", "constant", "--weight_sync_check_every", "1"),
        *("--eval_pass_at_k", "2", "--checkpoint_state_freq", "2"),
    ],
)  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return JOB.finish(tmp_path_factory.mktemp("uninterrupted"))


def steps(run) -> list[dict]:
    return [line for line in metrics(run) if "reward" in line]


def evaluations(run) -> list[dict]:
    """Each one's figures of what was sampled."""
    return [{k: v for k, v in line.items() if k.startswith("eval/")} for line in metrics(run) if "eval/scores" in line]


def test_the_reference_is_the_model_without_adapters(uninterrupted):
    """At first they add nothing. A reference that learns along would stay as near."""
    first, *_, last = steps(uninterrupted)
    assert first["objective/kl1_avg"] < 1e-12
    assert last["objective/kl1_avg"] > 1e-3 and last["loss/kl_avg"] > 1e-4


def test_trainer_and_engine_agree_while_adapters_grow(uninterrupted):
    """An engine without the adapters agrees in the first step only."""
    trained = steps(uninterrupted)
    assert len(trained) == STEPS
    assert all(step["debug/vllm_vs_local_logprob_diff_mean"] < 1e-5 for step in trained)
    ratios = [step["lora/update_ratio"] for step in trained]
    assert ratios[0] > 0 and ratios == sorted(ratios) and ratios[-1] > 1.5 * ratios[0]


def test_the_exported_adapter_is_the_exported_model(uninterrupted):
    """Whoever loads the one or the other gets what was trained."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base, merged = load_hf("examples/quickstart/model"), load_hf(export(uninterrupted))
    tokens = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        start, truth = base(tokens).logits, merged(tokens).logits
        found = peft.PeftModel.from_pretrained(base, export(uninterrupted) / "adapter").eval()(tokens).logits
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-4)
    assert (truth - start).abs().max() > 0.1


@pytest.mark.slow
def test_a_run_that_dies_goes_on_as_if_it_had_not(uninterrupted, tmp_path):
    """The adapters and their moments come from the state, the rest of the model from where it was."""
    JOB.fail(tmp_path, fault="kill forward", step=4)
    run = JOB.finish(tmp_path)
    assert origins(run) == [2]
    assert_equal(run, uninterrupted)
    ours, theirs = (
        (export(each) / "adapter" / "adapter_model.safetensors").read_bytes() for each in (run, uninterrupted)
    )
    assert ours == theirs


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(uninterrupted, tmp_path):
    """TP2 -> PP2: every rank takes its parts of the adapters, and reads those of the model that it had not held."""
    shutil.copytree(uninterrupted.output_dir, tmp_path / "out")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step_{step}")
    pipeline = ["--pipeline_model_parallel_size", "2", "--num_layers_in_first_pipeline_stage", "1"]  # of three
    run = JOB.finish(tmp_path, ["--tensor_model_parallel_size", "1", *pipeline])
    assert origins(run) == [2]
    assert complete(run.output_dir / "checkpoints") == [2, 4, 6]
    ours, theirs = steps(run), steps(uninterrupted)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for key in ("reward", "loss/total_avg", "optim/grad_norm", "lora/update_ratio", "loss/kl_avg"):
        assert ours[2][key] == pytest.approx(theirs[2][key], rel=1e-3, abs=1e-5), key
    assert ours[-1]["debug/vllm_vs_local_logprob_diff_mean"] < 1e-5


@pytest.mark.slow
def test_a_run_starts_from_an_adapter(uninterrupted, tmp_path):
    """As the policy that was exported, which the evaluations show; its rank is the folder's."""
    folder = export(uninterrupted) / "adapter"
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    run = JOB.finish(tmp_path, ["--lora_adapter_path", str(folder), "--total_episodes", "128"])
    assert evaluations(run)[0] == evaluations(uninterrupted)[-1] != evaluations(uninterrupted)[0]
    (step,) = steps(run)
    assert step["debug/vllm_vs_local_logprob_diff_mean"] < 1e-5
    assert step["objective/kl1_avg"] > 1e-3, "the reference is the model without any adapter"
