"""One vLLM engine by itself, without Ray and without training: it samples, sleeps, wakes, and takes over weights in place.

    python tools/gpu_whole_run_engine.py --config FILE.yaml [--name value ...]

Greedy answers to 64 problems are asked for four times: with the weights that vLLM has loaded, and, after a sleep, with other
weights that this process sends as a learner does, with the first ones sent back, and once more with these. The last line that it
prints is JSON; the exit code is 1 if an engine's digests differ, or if answers are not those of the weights that were sent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgrpo.config import Config
from mgrpo.moving import parse
from mgrpo.rollout.engine import Completions, PromptBatch, Sampling
from mgrpo.rollout.vllm.engine_arguments import engine_args, engine_environment, serving_gpus

NUM_PROBLEMS = 64
TIMEOUT_S = 60.0
HOST = "127.0.0.1"
ROUNDING = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
"""How far log-probabilities of the same weights and tokens may lie apart: kernels may sum in another order after a wake."""
MOST_DIFFERENT = 0.05
"""Share of tokens that may differ where two tokens are equally likely up to rounding."""


class Learner:
    """The training rank of the model that the configuration names, on the GPU that the engine is on."""

    def __init__(self, config: Config, device: str) -> None:
        import torch

        from mgrpo.layout import InferLayout, Layout
        from mgrpo.model_io.hf_folder import HfFolder
        from mgrpo.models.family import shape_of
        from mgrpo.models.hf_config import read_hf_config
        from mgrpo.models.placement.box_table import HeldBoxes
        from mgrpo.models.table import training_boxes
        from mgrpo.sync.channel import Sender
        from mgrpo.sync.group import open_store

        shape = shape_of(read_hf_config(config.model_path))
        self.dtype, layout = getattr(torch, config.model.model_dtype), Layout(world_size=1)
        folder, holdings = HfFolder(config.model_path, shape), training_boxes(shape, layout)
        self.weights = [(box, folder.read(box).to(device, torch.float32)) for box in holdings[0]]
        self.store, port = open_store(HOST, TIMEOUT_S)
        self.sender = Sender(
            self.weights,
            holdings=HeldBoxes.of(holdings),
            model=shape,
            train_layout=layout,
            infer_layout=InferLayout(),
            rank=0,
            dtype=self.dtype,
            store=self.store,
            host=HOST,
            port=port,
            bucket_bytes=config.engine.weight_sync_bucket_mb << 20,
            timeout_s=TIMEOUT_S,
            share_gpus=True,
        )
        self.version = 0

    async def join(self, actor: Any) -> None:
        """Meet the engine's worker."""
        ours = asyncio.to_thread(self.sender.join, {0: 0})
        failures, _ = await asyncio.gather(ours, actor.join(self.sender.invitation(0)))
        if failures:
            raise RuntimeError(failures[0])

    async def send(self, actor: Any) -> None:
        """Send all weights, and compare what the engine then has."""
        self.version += 1
        ours = asyncio.to_thread(self.sender.send, self.version, [0])
        failures, _ = await asyncio.gather(ours, actor.receive_weights(self.version, True, 0))
        if failures:
            raise RuntimeError(failures[0])
        self.sender.compare(self.version, self.sender.digests(), {0: 0})

    def change(self, factor: float) -> None:
        """Multiply every weight; by a power of two that is undone exactly."""
        for _, weight in self.weights:
            weight.mul_(factor)


def problems(config: Config) -> tuple[list[list[int]], Any]:
    """The ids of some held-out problems, and the tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model_path)
    lines = Path(config.data.dataset_mixer_eval_list[0]).read_text().splitlines()[:NUM_PROBLEMS]
    texts = [json.loads(line)["prompt"] for line in lines]
    return [tokenizer(text)["input_ids"] for text in texts], tokenizer


async def answers(
    actor: Any, prompts: Sequence[Sequence[int]], config: Config, stop: Sequence[int]
) -> list[Completions]:
    """Each prompt's greedy answer; the engine is paused before and after."""
    sampling = Sampling(
        num_samples=1, max_tokens=config.rollout.response_length, temperature=0.0, stop_token_ids=tuple(stop)
    )
    import numpy as np

    batch = PromptBatch(
        numbers=np.arange(len(prompts)),
        tokens=np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
        cu_seqlens=np.cumsum([0, *map(len, prompts)]),
        sampling=sampling,
    )
    await actor.submit(batch)
    await actor.resume()
    found: dict[int, Completions] = {}
    while len(found) < len(prompts):
        some = await asyncio.wait_for(actor.poll(), TIMEOUT_S)
        for number, (a, b) in zip(some["numbers"].tolist(), itertools.pairwise(some["cu_seqlens"]), strict=True):
            found[number] = {name: some[name][a:b] for name in ("tokens", "logprobs", "policy_versions")}
    await actor.pause("recompute")
    return [found[number] for number in range(len(prompts))]


def difference(first: Sequence[Completions], second: Sequence[Completions]) -> dict[str, float]:
    """How two lists of answers differ: the share of tokens, and log-probabilities up to the first token that does."""
    import numpy as np

    wrong = total = 0
    largest = 0.0
    for a, b in zip(first, second, strict=True):
        size = min(len(a["tokens"]), len(b["tokens"]))
        same = np.cumprod(a["tokens"][:size] == b["tokens"][:size]).sum()
        total += max(len(a["tokens"]), len(b["tokens"]))
        wrong += max(len(a["tokens"]), len(b["tokens"])) - same
        apart = np.abs(a["logprobs"][:same] - b["logprobs"][:same])
        largest = max(largest, float(apart.max(initial=0.0)))
    return {"tokens": wrong / total, "logprobs": largest}


async def check(config: Config, gpu: str | None) -> dict[str, Any]:
    """The findings; RuntimeError where something is wrong."""
    from mgrpo.rollout.vllm.actor import EngineActor

    prompts, tokenizer = problems(config)
    stop = [tokenizer.eos_token_id]
    start = time.monotonic()
    actor = EngineActor()
    await actor.start(engine_args(config, on_gpu=gpu is not None))
    figures: dict[str, Any] = {"start_s": time.monotonic() - start}
    try:
        loaded = await answers(actor, prompts, config, stop)
        print(
            "it says: " + ", ".join(tokenizer.decode([*p, *a["tokens"]]) for p, a in zip(prompts, loaded, strict=True))
        )
        free = free_bytes(gpu)
        await actor.sleep()
        figures["released_gib"] = (free_bytes(gpu) - free) / 2**30
        learner = Learner(config, "cpu" if gpu is None else "cuda")
        await learner.join(actor)
        found = []
        for factor in (0.5, 2.0, 1.0):
            learner.change(factor)
            begun = time.monotonic()
            await learner.send(actor)
            figures["sync_s"] = time.monotonic() - begun
            found.append(await answers(actor, prompts, config, stop))
            await actor.sleep()
        learner.sender.close()
    finally:
        if actor.engine is not None:
            actor.engine.shutdown()
            actor.engine = None
    other, back, again = (difference(loaded, each) for each in found)
    figures |= {"other_weights": other, "first_weights": back, "once_more": again, "versions": learner.version}
    if not other["tokens"] and other["logprobs"] <= ROUNDING[config.model.model_dtype]:
        raise RuntimeError(f"other weights gave the same answers: {figures}")
    for each in (back, again):
        if each["tokens"] > MOST_DIFFERENT or each["logprobs"] > ROUNDING[config.model.model_dtype]:
            raise RuntimeError(
                f"the weights that were sent back do not answer as those that vLLM has loaded: {figures}"
            )
    return figures


def free_bytes(gpu: str | None) -> int:
    """Free bytes of the GPU's memory; 0 without a GPU."""
    if gpu is None:
        return 0
    import torch

    return torch.cuda.mem_get_info()[0]


def main() -> None:
    config = parse(sys.argv[1:], world_size=1)
    gpu = next(iter(serving_gpus()), None)
    os.environ |= engine_environment(config, on_gpu=gpu is not None, is_local=True, num_local_learners=1)
    # vLLM forks unless CUDA is in use, and then this process could not use it.
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}
    print(json.dumps(asyncio.run(check(config, gpu))))


if __name__ == "__main__":
    main()
