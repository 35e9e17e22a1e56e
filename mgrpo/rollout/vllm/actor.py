"""The engine actor: vLLM's AsyncLLM behind two calls per step, submit and take, with flat arrays both ways.

The only file outside the plugin that imports vllm, and it does so inside the actor's process.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
from collections.abc import Awaitable, Mapping
from typing import Any

import numpy as np

from mgrpo.rollout.engine import FINISH_REASONS, UNSYNCED, Completions, PromptBatch, Sampling


class EngineActor:
    """One vLLM engine. All methods are coroutines of one event loop."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.numbers = itertools.count()
        self.is_stale = False
        self.version = UNSYNCED
        self.batches: dict[int, asyncio.Future[list[Any]]] = {}
        """Requests of the batches that were submitted and not taken."""
        self.sampled: list[Any] = []
        """Requests that are being sampled."""

    async def start(self, args: dict[str, Any]) -> None:
        """Load the model.

        Raises:
            FileNotFoundError: this node does not have its folder, or the tokenizer's.
        """
        for folder in (args["model"], args.get("tokenizer", args["model"])):
            if not os.path.isdir(folder):  # vLLM would look for it on the Hub
                raise FileNotFoundError(
                    f"{folder} is not a folder on {socket.gethostname()}, where this engine runs; every node that serves "
                    "needs the model and its tokenizer at the same path"
                )
        # Importing vllm makes a million objects that stay: without the collector it takes a fifth less time.
        gc.disable()
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        gc.freeze()
        gc.enable()
        transfer = WeightTransferConfig(backend="mgrpo")
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**args, weight_transfer_config=transfer))
        self._pause()

    def _pause(self) -> None:
        """Begin to freeze the scheduler and to drop what is cached of the present weights."""
        self.pausing = asyncio.create_task(self.engine.pause_generation(mode="keep", clear_cache=True))

    async def join(self, invitation: Mapping[str, Any]) -> None:
        """Join the weight-transfer group that the learners are joining at the same time."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info={"invitation": invitation})
        await self._while_alive(self.engine.init_weight_transfer_engine(request))

    async def seed(self, seed: int) -> None:
        """Seed the sampler; the weights stay."""
        await self._while_alive(self.pausing)
        await self._update({"seed": seed})

    async def receive_weights(self, version: int, check: bool, seed: int) -> None:
        """Take over the weights that the learners are sending, and seed the sampler. After a failure nothing is sampled."""
        await self._while_alive(self.pausing)
        self.is_stale, self.version = True, version
        await self._update({"seed": seed, "version": version, "check": check})
        self.is_stale = False

    async def _update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        # The engine core takes these in the order in which they are sent; waiting for each answer would cost two trips.
        await self._while_alive(
            asyncio.gather(
                self.engine.start_weight_update(),
                self.engine.update_weights(WeightTransferUpdateRequest(update_info=info)),
                self.engine.finish_weight_update(weight_version=str(self.version)),
            )
        )

    async def submit(self, batch: PromptBatch) -> None:
        """Queue prompts; nothing of them runs before `take`.

        So a batch can be queued while the learners still train on the one before, and what the scheduler and the sampler do
        depends on the batch and the seed alone, never on the order of arrival.
        """
        queued = self._batch(batch.number)
        try:
            await self._while_alive(self.pausing)
            prompts = [batch.tokens[a:b].tolist() for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]
            queued.set_result(await self._while_alive(self._add(prompts, batch.sampling, batch.seeds)))
        except Exception as err:
            queued.set_exception(err)

    async def take(self, number: int) -> Completions:
        """Sample the completions of a submitted batch with the present weights."""
        if self.is_stale:
            raise RuntimeError("the engine's last weight update failed; it must receive all weights before it samples")
        self.sampled = await self._batch(number)
        del self.batches[number]
        await self._while_alive(self.engine.resume_generation())
        outputs = await self._while_alive(_last_outputs(self.sampled))
        self.sampled = []
        self._pause()
        return _flatten([c for output in outputs for c in sorted(output.outputs, key=lambda c: c.index)])

    async def abort(self) -> None:
        """End what is being sampled and what is queued; `take` answers with the tokens so far."""
        queued = [batch.result() for batch in self.batches.values() if batch.done() and batch.exception() is None]
        requests = [request.request_id for request in itertools.chain(self.sampled, *queued)]
        await self._while_alive(self.engine.abort(requests, internal=True))

    async def _while_alive(self, work: Awaitable[Any]) -> Any:
        """The result of `work`, or an error soon after the engine core has died: vLLM leaves some calls waiting then."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=1.0))[0]:
            if self.engine.errored:
                task.cancel()
                raise self.engine.dead_error
        return task.result()

    def _batch(self, batch: int) -> asyncio.Future[list[Any]]:
        """The requests of a batch, once they are queued."""
        return self.batches.setdefault(batch, asyncio.get_running_loop().create_future())

    async def _add(self, prompts: list[list[int]], sampling: Sampling, seeds: np.ndarray | None) -> list[Any]:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        settings = {
            "n": sampling.num_samples,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            # Lists of numbers instead of a dict for each token: a fifth of the engine's time for them.
            "flat_logprobs": True,
            "skip_clone": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            **_stopping(sampling.stop_strings),
        }
        if seeds is None:
            params = [SamplingParams(**settings)] * len(prompts)
        else:
            params = [SamplingParams(**settings, seed=seed) for seed in seeds.tolist()]
        add = self.engine.add_request
        return [
            await add(str(next(self.numbers)), tokens_input(prompt), own)
            for prompt, own in zip(prompts, params, strict=True)
        ]


def _stopping(strings: tuple[str, ...]) -> dict[str, Any]:
    """What vLLM is told to look for in the text as it grows."""
    if not strings:
        return {"detokenize": False}
    return {
        "stop": list(strings),
        "include_stop_str_in_output": True,
        # "<|im_end|>" may be a special token.
        "skip_special_tokens": False,
        # With a tokenizer vLLM would also end at the tokenizer's eos; stop_token_ids alone decide.
        "ignore_eos": True,
    }


async def _last_outputs(requests: list[Any]) -> list[Any]:
    """The finished output of every request."""
    outputs = []
    for request in requests:
        while not (output := await request.get()).finished:
            pass
        outputs.append(output)
    return outputs


def _logprobs(completion: Any) -> list[float]:
    """Of each token of a completion."""
    found = completion.logprobs
    assert found.token_ids == list(completion.token_ids), "one per position, the sampled token's"
    return found.logprobs


def _flatten(completions: list[Any]) -> dict[str, np.ndarray]:
    lengths = [len(completion.token_ids) for completion in completions]
    versions = np.zeros(sum(lengths), dtype=np.int32)
    start = 0
    for completion, length in zip(completions, lengths, strict=True):
        for span in completion.weight_versions or ():
            version = UNSYNCED if span.version == "default" else int(span.version)
            versions[start + span.start : start + span.end] = version
        start += length
    return {
        "tokens": np.fromiter(itertools.chain.from_iterable(c.token_ids for c in completions), dtype=np.int32),
        "logprobs": np.array([*itertools.chain.from_iterable(_logprobs(c) for c in completions)], dtype=np.float32),
        "policy_versions": versions,
        "cu_seqlens": np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        "finish_reasons": np.array([FINISH_REASONS.index(c.finish_reason) for c in completions], dtype=np.int8),
    }
