"""The engine actor: vLLM's AsyncLLM behind one call a step, flat arrays both ways.

The only file that imports vllm outside the plugin, and it does so inside the actor's process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one batch."""

    num_samples: int
    max_tokens: int
    temperature: float
    """0 is greedy."""
    stop_token_ids: tuple[int, ...]


class EngineActor:
    """One vLLM engine. All methods are coroutines of one event loop."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.numbers = itertools.count()

    async def start(self, args: dict[str, Any]) -> dict[str, Any]:
        """Load the model; returns the process ids to watch and the versions found."""
        import vllm
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.prefix_caching = args["enable_prefix_caching"]
        transfer = WeightTransferConfig(backend="mgrpo")
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**args, weight_transfer_config=transfer))
        return {"pid": os.getpid(), "vllm": vllm.__version__}

    async def join(self, invitation: dict[str, Any]) -> None:
        """Join the weight-transfer group that the learners are joining at the same time."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"invitation": invitation}))

    async def receive_weights(self, version: int, check: bool) -> None:
        """Take over the weights that the learners are sending. Nothing may be generating: generation is not paused."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        update = WeightTransferUpdateRequest(update_info={"version": version, "check": check})
        await self.engine.start_weight_update()
        await self.engine.update_weights(update)
        await self.engine.finish_weight_update(weight_version=str(version))
        if self.prefix_caching:
            await self.engine.reset_prefix_cache()

    async def generate(
        self, tokens: np.ndarray, cu_seqlens: np.ndarray, seeds: np.ndarray, sampling: Sampling
    ) -> dict[str, np.ndarray]:
        """Sample `num_samples` completions of each prompt.

        Args:
            tokens: prompts end to end, `[sum(len)]` int32, cut by `cu_seqlens [prompts + 1]`.
            seeds: `[prompts]` int64; sample j of prompt i is drawn with seed `seeds[i] + j`.
        Returns:
            tokens, logprobs and policy_versions `[sum(len)]`, cut by cu_seqlens `[prompts * num_samples + 1]`;
            finish_reasons `[prompts * num_samples]` indexes FINISH_REASONS.
        """
        prompts = [tokens[a:b].tolist() for a, b in itertools.pairwise(cu_seqlens.tolist())]
        outputs = await asyncio.gather(
            *(self._sample(prompt, int(seed), sampling) for prompt, seed in zip(prompts, seeds, strict=True))
        )
        return _flatten([completion for output in outputs for completion in output])

    async def _sample(self, prompt: list[int], seed: int, sampling: Sampling) -> list[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=sampling.num_samples,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=None if sampling.temperature == 0 else seed,
            logprobs=0,
            detokenize=False,
            skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        last = None
        async for last in self.engine.generate({"prompt_token_ids": prompt}, params, str(next(self.numbers))):
            pass
        return sorted(last.outputs, key=lambda completion: completion.index)

    async def stop(self) -> None:
        """End the engine's own processes."""
        if self.engine is not None:
            self.engine.shutdown(timeout=0)


def _flatten(completions: list[Any]) -> dict[str, np.ndarray]:
    lengths = [len(completion.token_ids) for completion in completions]
    versions = np.zeros(sum(lengths), dtype=np.int32)
    start = 0
    for completion, length in zip(completions, lengths, strict=True):
        for span in completion.weight_versions or ():
            versions[start + span.start : start + span.end] = int(span.version)
        start += length
    return {
        "tokens": np.fromiter(itertools.chain.from_iterable(c.token_ids for c in completions), dtype=np.int32),
        "logprobs": np.fromiter(
            (step[token].logprob for c in completions for token, step in zip(c.token_ids, c.logprobs, strict=True)),
            dtype=np.float32,
        ),
        "policy_versions": versions,
        "cu_seqlens": np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        "finish_reasons": np.array([FINISH_REASONS.index(c.finish_reason) for c in completions], dtype=np.int8),
    }
