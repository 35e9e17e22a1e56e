"""The engine actor: vLLM's AsyncLLM behind calls that take effect in the order in which they were made.

The only file outside the plugin that imports vllm, and it does so inside the actor's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import numpy as np

from mgrpo.rollout.engine import FINISH_REASONS, UNSYNCED, Completions, Pause, PromptBatch, Sampling

GATHER_S = 0.02
"""How long a poll waits for more groups after the first one, while others are being sampled."""


class EngineActor:
    """One vLLM engine. All methods are coroutines of one event loop."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.is_stale = False
        self.version = UNSYNCED
        self.turn = asyncio.Condition()
        self.next_turn = 0
        self.adding = asyncio.Lock()
        self.pausing: asyncio.Task[None] | None = None
        """Of an engine that is paused, or will be when its completions are drained."""
        self.requests: dict[int, Any] = {}
        """Queued or being sampled, by number."""
        self.collecting: set[asyncio.Task[None]] = set()
        self.failure: BaseException | None = None
        """Why a request will never finish."""
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self.finished: list[Completions] = []
        """One group each."""
        self.has_finished = asyncio.Event()

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
        await self.pause("recompute")

    async def call(self, turn: int, method: str, *args: Any) -> Any:
        """Begin `method` once all calls of lower turns have begun: Ray starts the calls of an actor in any order."""
        async with self.turn:
            await self.turn.wait_for(lambda: self.next_turn == turn)
            work = asyncio.create_task(getattr(self, method)(*args))
            # Its first statements run before the next call's. An engine that has been told to sample does so before it is told
            # to pause.
            await (asyncio.wait({work}) if method == "resume" else asyncio.sleep(0))
            self.next_turn += 1
            self.turn.notify_all()
        return await work

    async def join(self, invitation: Mapping[str, Any]) -> None:
        """Join the weight-transfer group that the learners are joining at the same time."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info={"invitation": invitation})
        await self._while_alive(self.engine.init_weight_transfer_engine(request))

    async def pause(self, how: Pause) -> None:
        """Sample no more; see `Pause`."""
        if self.pausing is None:
            self.pausing = asyncio.create_task(self._pause(how))
        await self._while_alive(self.pausing)

    async def _pause(self, how: Pause) -> None:
        if how == "drain":
            await self.is_idle.wait()
        # AsyncLLM.pause_generation would do the same, and then sleep for 20 ms.
        await self.engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=how != "keep")

    async def resume(self) -> None:
        """Sample with the present weights what is queued, and what will be."""
        async with self.adding:
            await self._paused()
            if self.is_stale:
                raise RuntimeError(
                    "the engine's last weight update failed; it must receive all weights before it samples"
                )
            self.pausing = None
            await self._while_alive(self.engine.resume_generation())

    async def seed(self, seed: int) -> None:
        """Seed the sampler; the weights stay."""
        await self._paused()
        await self._update({"seed": seed})

    async def receive_weights(self, version: int, check: bool, seed: int) -> None:
        """Take over the weights that the learners are sending, and seed the sampler. After a failure nothing is sampled."""
        await self._paused()
        self.is_stale, self.version = True, version
        await self._update({"seed": seed, "version": version, "check": check})
        self.is_stale = False

    async def _paused(self) -> None:
        """Wait until the pause that has been asked for is reached; there may be none."""
        if self.pausing is not None:
            await self._while_alive(self.pausing)

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
        """Queue prompts.

        While the engine is paused, what the scheduler and the sampler will do depends on the batches and the seed alone, never
        on the time of their arrival.
        """
        async with self.adding:
            await self._paused()
            prompts = [batch.tokens[a:b].tolist() for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]
            self.is_idle.clear()
            await self._while_alive(self._add(batch.numbers.tolist(), prompts, batch.sampling, batch.seeds))

    async def poll(self) -> Completions:
        """The groups that have finished since the last poll; waits for the first."""
        await self._while_alive(self.has_finished.wait())
        if self.failure is not None:
            raise self.failure
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.is_idle.wait(), GATHER_S)
        finished, self.finished = self.finished, []
        self.has_finished.clear()
        return _joined(finished)

    async def ping(self) -> None:
        """Return when the engine core has answered as well, which it does between two steps."""
        if self.engine is not None:
            await self._while_alive(self.engine.engine_core.is_scheduler_paused_async())

    async def process(self) -> tuple[str, int]:
        """Ray's id of the node that this engine runs on, and the id of its process."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def abort(self) -> None:
        """End everything that is queued or sampled; `poll` hands it over with the tokens so far."""
        async with self.adding:
            requests = [request.request_id for request in self.requests.values()]
            await self._while_alive(self.engine.abort(requests, internal=True))

    async def _collect(self, number: int, request: Any) -> None:
        """Wait for the last output of a request."""
        while not (output := await request.get()).finished:
            pass
        self.finished.append(_flatten(number, sorted(output.outputs, key=lambda c: c.index)))
        self.has_finished.set()
        del self.requests[number]
        if not self.requests:
            self.is_idle.set()

    def _collected(self, task: asyncio.Task[None]) -> None:
        self.collecting.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self.failure = failure
            self.has_finished.set()

    async def _while_alive(self, work: Awaitable[Any]) -> Any:
        """The result of `work`, or an error soon after the engine core has died: vLLM leaves some calls waiting then."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=1.0))[0]:
            if self.engine.errored:
                task.cancel()
                raise self.engine.dead_error
        return task.result()

    async def _add(
        self, numbers: Sequence[int], prompts: Sequence[list[int]], sampling: Sampling, seeds: np.ndarray | None
    ) -> None:
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
        for number, prompt, own in zip(numbers, prompts, params, strict=True):
            # What other groups have left in the cache may be of older weights, see `Pause`, also when a prompt is queued before
            # an update and begins after it: only the samples of this group share its prompt.
            salted = tokens_input(prompt, cache_salt=str(number))
            self.requests[number] = await self.engine.add_request(str(number), salted, own)
            task = asyncio.create_task(self._collect(number, self.requests[number]))
            self.collecting.add(task)
            task.add_done_callback(self._collected)


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


def _logprobs(completion: Any) -> list[float]:
    """Of each token of a completion."""
    found = completion.logprobs
    assert found.token_ids == list(completion.token_ids), "one per position, the sampled token's"
    return found.logprobs


def _flatten(number: int, completions: Sequence[Any]) -> Completions:
    """One group, with `lengths [samples]` instead of `cu_seqlens`."""
    lengths = [len(completion.token_ids) for completion in completions]
    versions = np.zeros(sum(lengths), dtype=np.int32)
    start = 0
    for completion, length in zip(completions, lengths, strict=True):
        for span in completion.weight_versions or ():
            version = UNSYNCED if span.version == "default" else int(span.version)
            versions[start + span.start : start + span.end] = version
        start += length
    return {
        "numbers": np.array([number], dtype=np.int64),
        "sizes": np.array([len(completions)], dtype=np.int64),
        "tokens": np.fromiter(itertools.chain.from_iterable(c.token_ids for c in completions), dtype=np.int32),
        "logprobs": np.array([*itertools.chain.from_iterable(_logprobs(c) for c in completions)], dtype=np.float32),
        "policy_versions": versions,
        "lengths": np.array(lengths, dtype=np.int64),
        "finish_reasons": np.array([FINISH_REASONS.index(c.finish_reason) for c in completions], dtype=np.int8),
    }


def _joined(groups: Sequence[Completions]) -> Completions:
    """Of several groups."""
    joined = {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}
    lengths = joined.pop("lengths")
    return {**joined, "cu_seqlens": np.concatenate(([0], np.cumsum(lengths)))}
