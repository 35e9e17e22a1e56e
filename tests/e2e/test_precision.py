"""Logits in fp32 and 8-bit keys and values, in a real engine: how far it is from the trainer with and without them."""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from mgrpo.moving import from_values
from mgrpo.rollout.vllm import engine_arguments
from tests.e2e.interrupted import Job, metrics
from tests.ranks.conftest import run_ranks  # noqa: F401  (a fixture)
from tests.tiny_models import load_hf, save_tiny
from tools.bench_cases.precision import Row, Side, compared, sampled, scored

PROMPTS = [np.arange(3, 3 + length) for length in (40, 9, 70)]
BF16, FP32 = Side(dtype="bfloat16"), Side(dtype="float32")
FP32_HEAD, FP8_CACHE = dataclasses.replace(BF16, fp32_head=True), dataclasses.replace(FP32, cache="fp8")


def engines(model: Path, *sides: Side) -> dict[Side, list[Row]]:
    """What engines of these kinds sample."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as children:
        tasks = {side: children.submit(sampled, str(model), side, PROMPTS, samples=2, tokens=24) for side in sides}
        return {side: task.result(300) for side, task in tasks.items()}


def difference(run_ranks, model, rows, side):  # noqa: F811
    (trainer,) = run_ranks(1, scored, model=str(model), side=side, rows=rows)
    return compared(rows, trainer)


def test_logits_in_fp32_bring_trainer_and_engine_together(run_ranks, tmp_path):  # noqa: F811
    """If either half of the setting were missing, the head would round on one side alone.

    Layers that add nothing give the head of both the same input; it makes logits of standard deviation 8.
    """
    folder = save_tiny(tmp_path, "llama", heads=2, vocab_size=160)
    hf = load_hf(folder)
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        hf.model.norm.weight.fill_(1.0)
        hf.lm_head.weight.mul_(8 / hf.lm_head.weight.std() / hf.config.hidden_size**0.5)
    hf.save_pretrained(folder)
    rows = engines(folder, BF16, FP32_HEAD)
    found = {
        (engine, trainer): difference(run_ranks, folder, rows[engine], trainer)["diff_mean"]
        for engine in rows
        for trainer in rows
    }
    print({f"{engine} - {trainer}": value for (engine, trainer), value in found.items()})
    both = found.pop((FP32_HEAD, FP32_HEAD))
    assert both < 1e-3
    del found[BF16, BF16]  # which may round in the same way
    assert all(one_side > 10 * both for one_side in found.values())


def test_an_8_bit_cache_is_another_policy(run_ranks, tmp_path):  # noqa: F811
    """The setting reaches the engine, whose log-probabilities are then those of rounded keys and values."""
    config = from_values({"vllm_kv_cache_dtype": "fp8"})
    if problems := engine_arguments.machine_problems(
        config, num_local_learners=0, hf_config={"head_dim": 32}, starts_engines=True
    ):
        pytest.skip(problems[0])
    folder = save_tiny(tmp_path, "llama", heads=2, vocab_size=160)
    rows = engines(folder, FP32, FP8_CACHE)
    assert difference(run_ranks, folder, rows[FP32], FP32)["diff_max"] < 1e-4
    assert 1e-4 < difference(run_ranks, folder, rows[FP8_CACHE], FP32)["diff_mean"] < 0.5


@pytest.mark.slow
def test_float16_logits_in_fp32_cut_sampling_and_adapters_in_one_run(tmp_path):
    """Each changes what the head computes, or from what; digests show that the engine holds the merged weights."""
    flags = ["--model_dtype", "float16", "--cast_lm_head_to_fp32", "true", "--top_k", "8", "--beta", "0.01"]
    flags += ["--weight_sync_check_every", "1", "--warm_up_steps", "0", "--total_episodes", "1024"]
    run = Job(config="quickstart_lora", flags=flags).finish(tmp_path)
    trained = [line for line in metrics(run) if "reward" in line]
    assert [line["policy_version"] for line in trained] == [1, 2, 3, 4], "an update was skipped"
    print([line["debug/vllm_vs_local_logprob_diff_mean"] for line in trained])
    for line in trained:
        assert line["debug/vllm_vs_local_logprob_diff_mean"] < 2e-3
        assert 1 < line["rollout/kept_tokens_avg"] <= 8 and line["policy/loss_scale"] >= 1
    assert trained[-1]["lora/update_ratio"] > trained[0]["lora/update_ratio"] > 0
