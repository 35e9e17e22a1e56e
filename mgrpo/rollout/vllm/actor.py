"""The engine actor: vLLM's AsyncLLM in a Ray actor, with an engine core for each copy of the engine's attention.

Only this file, `local_core` and the plugin import vllm, inside the actor's process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.models.adapters import ENGINE_ADAPTER, LoraShape, are_apart
from mgrpo.models.hf_files.hub import HubSnapshot
from mgrpo.rollout.drafts import reads_heads
from mgrpo.rollout.engine import GATHER_S, Completions, PromptBatch, RefusedError
from mgrpo.rollout.mixtures import Mixtures, mixtures
from mgrpo.rollout.vllm.calls import EngineCalls, flattened, of_prompt, own_settings, salts, sampling_settings
from mgrpo.rollout.vllm.kept_sets import kept_tokens, masked_tokens
from mgrpo.rollout.vllm.ray_processes.engine_part import begin_parts, prepare
from mgrpo.types import KeptTokens


class EngineActor(EngineCalls):
    """One vLLM engine in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Any = None
        self.adapter: Any = None
        """LoRA request of the policy's adapter, if it is not merged into the model."""
        self.asleep: set[str] = set()
        """Parts without memory on the device, by vLLM's tags."""
        self.waking = asyncio.Lock()
        self.drafts: np.ndarray | None = None
        """`[3]` int64: drafts, drafted tokens and accepted tokens since the last poll; None: no speculative decoding."""
        self.copies = Copies(1)
        self.lost: RuntimeError | None = None
        """Reason why another node's part of the engine has ended."""

    async def start(
        self,
        args: dict[str, Any],
        snapshots: Sequence[HubSnapshot] = (),
        *,
        log: Path | None = None,
        interfaces: Mapping[str, str] | None = None,
        has_local_core: bool = False,
        teacher_temperature: float | None = None,
    ) -> None:
        """Load the model.

        Args:
            snapshots: models with a name on the Hub, in the cache of rank 0's machine; each other machine has its own cache.
            log: see `print_into`.
            interfaces: network interfaces for all nodes that choose none themselves; None: all engines are on one machine.
            has_local_core: the engine core is in this process, see `local_core`.
            teacher_temperature: divisor of the logits in a teacher's engine, which gets no weight syncs. None: the policy's engine.
        Raises:
            FileNotFoundError: this node lacks the model's or the tokenizer's folder.
        """
        self.copies = Copies(args.get("data_parallel_size", 1))
        if self.copies.count > 1 and (ends := begin_parts(args, snapshots, log=log, interfaces=interfaces)):
            threading.Thread(target=self._watch, args=(ends,), name="parts", daemon=True).start()
        await asyncio.to_thread(prepare, args, snapshots, log=log, interfaces=interfaces)
        # Importing vllm makes a million objects that stay: without the collector it takes a fifth less time.
        gc.disable()
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if has_local_core:
            from mgrpo.rollout.vllm import local_core

            local_core.install()
        self.num_logprobs = args.get("max_logprobs", 0)
        self.has_masks = args.get("return_sampling_mask", False)
        self.mixtures = mixtures(args["model"]) if args.get("enable_return_routed_experts") else None
        gc.freeze()
        gc.enable()
        transfer = WeightTransferConfig(backend="mgrpo") if teacher_temperature is None else None
        loggers = []
        if "speculative_config" in args:
            self.drafts = np.zeros(3, np.int64)
            loggers.append(draft_logger(self.drafts))
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**args, weight_transfer_config=transfer), stat_loggers=loggers
        )
        if reads_heads(args):
            await self.engine.collective_rpc("read_heads")
        if teacher_temperature not in (None, 1.0):
            await self.engine.collective_rpc("divide_logits", args=(teacher_temperature,))
        await self.pause("recompute")

    def _watch(self, ends: list[Any]) -> None:
        """Wait for the end of any part, which ends the engine."""
        import ray

        (end, *_), _ = ray.wait(ends)
        try:
            reason: object = ray.get(end)
        except Exception as err:
            reason = err
        self.lost = RuntimeError(f"a part of the engine on another node has ended: {str(reason).splitlines()[-1]}")
        if self.engine is None:
            # vLLM waits for the part without a limit, and cannot be interrupted.
            print(f"RuntimeError: {self.lost}", flush=True)
            os._exit(1)

    async def join(self, invitation: Mapping[str, Any]) -> None:
        """Join the weight-transfer group that the learners are joining at the same time."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.lora.request import LoRARequest

        if (lora := invitation.get("lora")) and are_apart(LoraShape(**lora)):
            # It is never read from a folder.
            self.adapter = LoRARequest("policy", ENGINE_ADAPTER, "weight sync")
        await self._wake("weights")
        request = WeightTransferInitRequest(init_info={"invitation": invitation})
        await self._while_alive(self.engine.init_weight_transfer_engine(request))

    async def _stop(self, *, clear_cache: bool) -> None:
        # AsyncLLM.pause_generation does the same, and then sleeps for 20 ms.
        await self.engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)

    async def _go_on(self) -> None:
        # When the last part wakes, vLLM itself resumes.
        await self._wake("kv_cache")
        await self.engine.resume_generation()

    async def sleep(self) -> None:
        """Pause, and release the devices' memory: weights, which must be received before it resumes, and the cache."""
        await self.pause("recompute")
        self.is_stale = True
        # Level 1 would copy the weights to host memory; the default of `mode` is "abort".
        await self._while_alive(self.engine.sleep(level=2, mode="keep"))
        self.asleep = {"weights", "kv_cache"}

    async def _wake(self, part: str) -> None:
        async with self.waking:
            if part in self.asleep:
                await self._while_alive(self.engine.wake_up(tags=[part]))
                self.asleep.remove(part)

    async def receive_weights(self, version: int, check: bool, seed: int) -> None:
        """See `EngineCalls.receive_weights`; restores the weights' memory first."""
        await self._wake("weights")
        self.copies.forget()
        await super().receive_weights(version, check, seed)

    async def _update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        # The engine core takes these in the order in which they are sent; waiting for each answer would cost two round trips.
        await asyncio.gather(
            self.engine.start_weight_update(),
            self.engine.update_weights(WeightTransferUpdateRequest(update_info=info)),
            self.engine.finish_weight_update(weight_version=str(self.version)),
        )

    async def poll(self, gather_s: float = GATHER_S) -> Completions:
        """See `EngineCalls.poll`; adds the counts of drafts."""
        found = await super().poll(gather_s)
        if self.drafts is None:
            return found
        drafts = self.drafts.copy()
        self.drafts -= drafts
        return found | {"drafts": drafts}

    async def _abort(self, requests: Sequence[str]) -> None:
        await self.engine.abort(requests, internal=True)

    def _death(self) -> BaseException | None:
        if self.engine.errored:
            return self.engine.dead_error
        if self.lost is not None:
            return self.lost
        # It wakes idle copies while others compute; without it they would wait for each other, and vLLM does not monitor it.
        coordinator = self.engine.engine_core.resources.coordinator if self.copies.count > 1 else None
        if coordinator is not None and not coordinator.proc.is_alive():
            return RuntimeError("the process that coordinates the engine's copies of attention has died")
        return None

    async def ping(self) -> None:
        """Return when every engine core has answered, which it does between two steps."""
        if self.engine is not None:
            # While a pause is being reached, the cores would not agree on whether they are paused.
            await self._while_alive(self.engine.engine_core.get_supported_tasks_async())

    async def process(self) -> tuple[str, int]:
        """Ray's id of this engine's node, and its process id."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def _add(self, batch: PromptBatch, prompts: Sequence[list[int]]) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        settings = {
            **sampling_settings(batch.sampling, num_logprobs=self.num_logprobs),
            # Lists of numbers instead of a dict for each token take a fifth of the engine's time.
            "flat_logprobs": True,
            "skip_clone": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        constraint = settings.pop("structured_outputs", None)
        # Other errors are the engine's own.
        refusals = (VLLMClientError, ValueError, TypeError, ArithmeticError, LookupError, NotImplementedError)
        reading = {
            "num_logprobs": settings["logprobs"],
            "has_masks": self.has_masks and batch.sampling.has_sets,
            "mixtures": self.mixtures if batch.sampling.keeps_routes else None,
        }
        starts = [None] * len(prompts) if batch.starts is None else batch.starts.tolist()
        asked = zip(batch.numbers.tolist(), prompts, salts(batch), own_settings(batch), starts, strict=True)
        params = None
        for number, prompt, salt, own, start in asked:
            salted = tokens_input(prompt, cache_salt=str(salt))
            copy = self.copies.take(salt, settings["n"])
            try:
                if params is None or own:
                    grammar = constraint and StructuredOutputsParams(**constraint)
                    params = SamplingParams(structured_outputs=grammar, **(settings | own))
                request = await self.engine.add_request(
                    str(number), salted, params, lora_request=self.adapter, data_parallel_rank=copy
                )
            except refusals as err:
                self.copies.give_back(copy, settings["n"])
                self._refuse(number, str(err) or type(err).__name__)
                continue
            group = self.copies.until_done(copy, settings["n"], _group(number, request, start=start, **reading))
            self._expect(number, request.request_id, group)


def draft_logger(counts: np.ndarray) -> Any:
    """A logger class for vLLM that adds to `counts`, see `EngineActor.drafts`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class DraftLogger(StatLoggerBase):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            stats = scheduler_stats and scheduler_stats.spec_decoding_stats
            if stats:
                counts[:] += stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens

        def log_engine_initialized(self) -> None:
            pass

    return DraftLogger


class Copies:
    """Load balancer over the data-parallel copies of an engine's attention, each with a cache of its own.

    All samples of a group, and its later turns, go to the copy with the prompt in its cache; a new group to the copy with the fewest
    samples. vLLM itself would spread the samples over all copies, by counts that arrive ten times a second.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.samples = [0] * count
        """Number of queued or running samples, by copy."""
        self.places: dict[int, int] = {}
        """The copy of each group since the last weight update, by its salt."""

    def take(self, salt: int, samples: int) -> int | None:
        """Assign samples of a group to a copy; None: there is only one."""
        if self.count == 1:
            return None
        copy = self.places.setdefault(salt, min(range(self.count), key=self.samples.__getitem__))
        self.samples[copy] += samples
        return copy

    async def until_done(self, copy: int | None, samples: int, group: Coroutine[Any, Any, Completions]) -> Completions:
        """Await the group, then give its samples back."""
        try:
            return await group
        finally:
            self.give_back(copy, samples)

    def give_back(self, copy: int | None, samples: int) -> None:
        """Subtract finished samples from a copy's count."""
        if copy is not None:
            self.samples[copy] -= samples

    def forget(self) -> None:
        """Forget the places of groups: the caches belong to the old weights."""
        self.places.clear()


async def _group(
    number: int,
    request: Any,
    *,
    num_logprobs: int = 0,
    has_masks: bool = False,
    mixtures: Mixtures | None = None,
    start: int | None = None,
) -> Completions:
    """The group of a request, from its last output.

    Args:
        start: first scored token of the prompt; None: prompt tokens are not scored.
        num_logprobs: log-probabilities at each position besides the sampled token's; above 0 they yield the sampling mask.
        has_masks: vLLM returns the sampling mask.
        mixtures: MoE layers of which the engine returns routed experts.
    Raises:
        RefusedError: vLLM has accepted the request but cannot process it, for example because its grammar does not compile.
    """
    while not (output := await request.get()).finished:
        pass
    completions = sorted(output.outputs, key=lambda c: c.index)
    if any(completion.finish_reason == "error" for completion in completions):
        raise RefusedError("vLLM has ended the request with an error; the engine's log says why")
    step = num_logprobs + 1
    logprobs = [_logprobs(completion, step) for completion in completions]
    if any(completion.finish_reason == "abort" for completion in completions):
        # The result is discarded, and vLLM's output is incomplete.
        return flattened(number, completions, logprobs)
    kept = None
    if has_masks:
        kept = [masked_tokens(c.token_ids, c.sampling_mask and c.sampling_mask.token_ids) for c in completions]
    elif num_logprobs:
        kept = [_kept(completion, step) for completion in completions]
    routes = None
    if mixtures is not None:
        prompt = len(output.prompt_token_ids)
        routes = [mixtures.routes(c.routed_experts, prompt, len(c.token_ids)) for c in completions]
    group = flattened(number, completions, logprobs, kept, routes)
    return group if start is None else group | _prompt_logprobs(output, start)


def _prompt_logprobs(output: Any, start: int) -> Completions:
    """Log-probabilities of the prompt's tokens from `start` on; vLLM puts each token before the likeliest ones at its place."""
    found, tokens = output.prompt_logprobs, output.prompt_token_ids[start:]
    first = found.start_indices[start]
    ids = np.array(found.token_ids[first:], np.int32).reshape(len(tokens), -1)
    logprobs = np.array(found.logprobs[first:], np.float32).reshape(ids.shape)
    assert ids[:, 0].tolist() == list(tokens), "one row per position, the prompt's token first"
    return of_prompt(logprobs[:, 0], ids[:, 1:], logprobs[:, 1:])


def _logprobs(completion: Any, step: int) -> list[float]:
    """The log-probability of each token of a completion: the first of the `step` entries of each position."""
    found = completion.logprobs
    assert found.token_ids[::step] == list(completion.token_ids), "one per position, the sampled token's"
    return found.logprobs[::step]


def _kept(completion: Any, step: int) -> KeptTokens:
    found = completion.logprobs
    ids, logprobs = np.array(found.token_ids, np.int32), np.array(found.logprobs, np.float32)
    ids, logprobs = ids.reshape(-1, step), logprobs.reshape(-1, step)
    return kept_tokens(ids[:, 0], ids[:, 1:], logprobs[:, 1:])
