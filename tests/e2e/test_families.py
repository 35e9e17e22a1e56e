"""A tiny model of each family through a whole run: sampled, trained, synced, killed, resumed, exported, and loaded by others."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.rollout.engine import Sampling
from tests.e2e.interrupted import Job, assert_equal, export, metrics, origins
from tests.e2e.launching import ROOT
from tests.e2e.lone_engine import lone_engine
from tests.sampling import prompt_batch, sampled
from tests.tiny_models import load_hf, save_tiny

TOKENS, END = 64, 1
"""Of the quickstart's tokenizer."""
STEPS = 4
FLAGS = [
    *("--num_unique_prompts_rollout", "4", "--num_samples_per_prompt_rollout", "4", "--total_episodes", str(STEPS * 16)),
    *("--learning_rate", "0.005", "--warm_up_steps", "0", "--local_eval_every", "-1"),
    *("--weight_sync_check_every", "1", "--checkpoint_state_freq", "2", "--sequence_parallel", "true"),
]  # fmt: skip
REWARD = '''
def of_ids(completions, completion_ids, **columns):
    """How many of a completion's tokens have an even id."""
    return [sum(token % 2 == 0 for token in ids) / 6 for ids in completion_ids]
'''
FAMILIES = (
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "kimi_k2",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gpt_oss",
    "seed_oss",
)
ENGINE_DIFFERENCE = 5e-5
"""Of a log-probability, between the engine and the trainer in float32: what other orders of summation make of it."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    made = save_tiny(folder, family, vocab_size=TOKENS, eos_token_id=END)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples/quickstart/model" / name, made / name)
    return made


@pytest.fixture(scope="module")
def job(model, tmp_path_factory):
    rewards = tmp_path_factory.mktemp("rewards") / "rewards.py"
    rewards.write_text(REWARD)
    return Job(flags=[*FLAGS, "--model_name_or_path", str(model), "--reward_funcs", f"{rewards}:of_ids"])


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    return job.finish(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_engine_and_trainer_are_one_model_after_every_step(whole, model):
    """A weight that a sync misses, or a layer that computes something else, shows in the first sample after an update."""
    steps = [line for line in metrics(whole) if "reward" in line]
    assert len(steps) == STEPS
    has_experts = shape_of(read_hf_config(model)).experts is not None
    for line in steps:
        assert line["debug/vllm_vs_local_logprob_diff_max"] < ENGINE_DIFFERENCE, line["step"]
        assert ("policy/routing_differs" in line) == ("moe/idle_experts" in line) == has_experts, line["step"]
    assert len({line["reward"] for line in steps}) > 1


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(job, whole, tmp_path):
    """Whatever the family keeps beside weights must come back from the saved state."""
    job.fail(tmp_path, fault="kill forward", step=4)
    resumed = job.finish(tmp_path)
    assert origins(resumed) == [2]
    assert_equal(resumed, whole)


@pytest.mark.slow
def test_what_is_exported_is_the_trained_model_for_transformers_and_the_engine(whole, model, tmp_path):
    """Names and types are the Hub's: whoever reads the export computes what was trained."""
    before, after = (load_file(folder / "model.safetensors") for folder in (model, export(whole)))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in before.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in after.items()
    }
    same = [name for name in before if torch.equal(before[name], after[name])]
    # An expert to which no token has gone has no gradient.
    assert all(name.endswith("e_score_correction_bias") or ".mlp.experts." in name for name in same), same
    assert len(same) < len(before) / 4
    values = {
        "model_name_or_path": str(export(whole)),
        "model_dtype": "float32",
        "max_prompt_token_length": 16,
        "response_length": 16,
        "output_dir": str(tmp_path),
    }
    prompts = [np.arange(3, 3 + n) for n in (1, 5, 9, 13)]
    sampling = Sampling(num_samples=2, max_tokens=12, temperature=1.0, stop_token_ids=(END,))
    with lone_engine(values) as fleet:
        got = sampled(fleet.engines[0], prompt_batch(prompts, sampling))
    oracle = load_hf(export(whole))
    repeated = [prompt for prompt in prompts for _ in range(sampling.num_samples)]
    for prompt, first, last in zip(repeated, got["cu_seqlens"][:-1], got["cu_seqlens"][1:], strict=True):
        ids = torch.from_numpy(np.concatenate((prompt, got["tokens"][first:last]))).long()[None]
        with torch.no_grad():
            scores = torch.log_softmax(oracle(ids).logits[0, len(prompt) - 1 : -1], -1)
        expected = scores.gather(1, ids[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(got["logprobs"][first:last], expected.numpy(), atol=ENGINE_DIFFERENCE)
