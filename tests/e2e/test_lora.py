"""Runs with adapters: trainer, engine, export and reference are the policies they should be, also after a death."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch

from mgrpo.checkpoint.folder import complete
from mgrpo.data.tokenizer import load_tokenizer
from mgrpo.models.adapters import LoraShape, adapter_tensors
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.table import hf_tensors
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


APART = ["--lora_sync", "adapter", "--save_freq", "2"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return JOB.finish(tmp_path_factory.mktemp("uninterrupted"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Engines get the adapter alone, and every sync compares digests."""
    return JOB.finish(tmp_path_factory.mktemp("apart"), APART)


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


def test_engines_with_adapters_of_their_own_learn_the_same(uninterrupted, apart):
    """An adapter that is not applied, or stays that of an earlier step, samples from another policy."""
    ours, theirs = steps(apart), steps(uninterrupted)
    assert len(ours) == STEPS
    assert all(step["debug/vllm_vs_local_logprob_diff_mean"] < 1e-5 for step in ours)
    shape = shape_of(read_hf_config("examples/quickstart/model"))
    tensors, weights = adapter_tensors(shape, LoraShape(rank=8, alpha=16)), hf_tensors(shape)
    for run, sent in ((ours, tensors), (theirs, weights)):
        assert {step["sync/bytes"] for step in run} == {4 * sum(map(math.prod, sent.values()))}
    assert ours[0]["reward"] == theirs[0]["reward"], "an adapter that adds nothing"
    first, *_, last = evaluations(apart)
    assert last["eval/scores"] > first["eval/scores"] + 0.1
    assert last["eval/scores"] == pytest.approx(evaluations(uninterrupted)[-1]["eval/scores"], abs=0.05)


@pytest.mark.parametrize("step", [2, 4])
def test_engines_with_adapters_of_their_own_sample_as_peft_computes(apart, step):
    """The log-probabilities of what is sampled after a step, written with four decimals, are those of its export."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    tokenizer, base = load_tokenizer("examples/quickstart/model"), load_hf("examples/quickstart/model")
    lines = (apart.output_dir / "rollouts" / "train_samples.jsonl").read_text().splitlines()
    samples = [sample for sample in map(json.loads, lines) if sample["step"] == step + 1]
    assert len(samples) == 8 and {sample["policy_version"] for sample in samples} == {step}

    def differences(model) -> np.ndarray:
        found = []
        for sample in samples:
            prompt = tokenizer.encode(sample["prompt"])
            tokens = [tokenizer.convert_tokens_to_ids(token) for token in sample["tokens"]]
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1)[range(len(tokens)), tokens].numpy()
            found.append(np.abs(own - sample["logprobs"]).max())
        return np.array(found)

    without = differences(base)
    folder = apart.output_dir / "hf" / f"step_{step}" / "adapter"
    adapted = peft.PeftModel.from_pretrained(base, folder).eval()
    assert differences(adapted).max() < 1e-4 < 0.05 < without.mean()


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_a_run_that_dies_goes_on_as_if_it_had_not(request, sync, tmp_path):
    """The adapters and their moments come from the state, the rest of the model from where it was."""
    reference, flags = ("apart", APART) if sync == "adapter" else ("uninterrupted", [])
    reference = request.getfixturevalue(reference)
    JOB.fail(tmp_path, flags, fault="kill forward", step=4)
    run = JOB.finish(tmp_path, flags)
    assert origins(run) == [2]
    assert_equal(run, reference)
    ours, theirs = ((export(each) / "adapter" / "adapter_model.safetensors").read_bytes() for each in (run, reference))
    assert ours == theirs


@pytest.mark.slow
def test_adapters_reach_engines_of_several_workers_from_learners_that_share_them(apart, tmp_path):
    """Each worker has B's rows, or A's columns, of its own weights: another cut than the learners'."""
    layout = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true", "--vllm_tensor_parallel_size", "2"]
    run = JOB.finish(tmp_path, [*APART, *layout, "--vllm_num_engines", "2", "--total_episodes", "256"])
    ours, theirs = steps(run), steps(apart)
    assert all(step["debug/vllm_vs_local_logprob_diff_mean"] < 1e-5 for step in ours)
    assert ours[0]["sync/bytes"] > 2 * theirs[0]["sync/bytes"], "what is the same on both workers goes to each"


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
