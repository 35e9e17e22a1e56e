"""The engine actor: vLLM's AsyncLLM in a Ray actor.

Only this file, `local_core` and the plugin import vllm, inside the actor's process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.models.adapters import ENGINE_ADAPTER, LoraShape, are_apart
from mgrpo.models.hf_files.hub import HubSnapshot, fetch_apart
from mgrpo.processes.address import own_interfaces
from mgrpo.rollout.engine import GATHER_S, Completions, PromptBatch
from mgrpo.rollout.mixtures import Mixtures, mixtures
from mgrpo.rollout.vllm.calls import EngineCalls, flattened, of_prompt, own_settings, salts, sampling_settings
from mgrpo.rollout.vllm.kept_sets import kept_tokens, masked_tokens
from mgrpo.rollout.vllm.printed import print_into
from mgrpo.types import KeptTokens


class EngineActor(EngineCalls):
    """One vLLM engine in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Any = None
        self.adapter: Any = None
        """What names the policy's adapter in a request, where engines have it beside the model."""
        self.asleep: set[str] = set()
        """The parts without memory on the device, by vLLM's tags."""
        self.waking = asyncio.Lock()
        self.drafts: np.ndarray | None = None
        """`[3]` int64: drafts, their tokens, and those that were accepted, since the last poll; None where the engine does not draft."""

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
            interfaces: network interfaces for all nodes that choose none themselves; None where all engines are on one machine.
            has_local_core: the engine core is in this process, see `local_core`.
            teacher_temperature: logits are divided by it, and the weights stay as they are loaded. None: the policy's engine.
        Raises:
            FileNotFoundError: this node does not have its folder, or the tokenizer's.
        """
        if log is not None:
            print_into(log)
        if interfaces is not None:
            _choose_interfaces(interfaces, spans_nodes=args.get("distributed_executor_backend") == "ray")
        if not os.environ.get("OMP_NUM_THREADS", "1"):
            # The environment that Ray is asked for can set a variable, but not remove it.
            del os.environ["OMP_NUM_THREADS"]
        own = {str(snapshot.folder): snapshot for snapshot in snapshots}
        for key in ("model", "tokenizer"):
            if snapshot := own.get(args.get(key, "")):
                part = "served" if args.get("load_format") == "dummy" else snapshot.part
                args[key] = await asyncio.to_thread(fetch_apart, replace(snapshot, part=part))
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
        if teacher_temperature not in (None, 1.0):
            await self.engine.collective_rpc("divide_logits", args=(teacher_temperature,))
        await self.pause("recompute")

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
        """Pause, and give up the devices' memory: weights, which must be received before it resumes, and the cache."""
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
        """See `EngineCalls.receive_weights`; the weights' memory is taken back first."""
        await self._wake("weights")
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
        """See `EngineCalls.poll`; with the counts of drafts."""
        found = await super().poll(gather_s)
        if self.drafts is None:
            return found
        drafts = self.drafts.copy()
        self.drafts -= drafts
        return found | {"drafts": drafts}

    async def _abort(self, requests: Sequence[str]) -> None:
        await self.engine.abort(requests, internal=True)

    def _death(self) -> BaseException | None:
        return self.engine.dead_error if self.engine.errored else None

    async def ping(self) -> None:
        """Return when the engine core has answered as well, which it does between two steps."""
        if self.engine is not None:
            await self._while_alive(self.engine.engine_core.is_scheduler_paused_async())

    async def process(self) -> tuple[str, int]:
        """Ray's id of the node that this engine runs on, and the id of its process."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def _add(self, batch: PromptBatch, prompts: Sequence[list[int]]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        settings = {
            **sampling_settings(batch.sampling, num_logprobs=self.num_logprobs),
            # Lists of numbers instead of a dict for each token: a fifth of the engine's time for them.
            "flat_logprobs": True,
            "skip_clone": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        if constraint := settings.get("structured_outputs"):
            settings["structured_outputs"] = StructuredOutputsParams(**constraint)
        if batch.seeds is None and batch.max_tokens is None:
            params = [SamplingParams(**settings)] * len(prompts)
        else:
            params = [SamplingParams(**(settings | own)) for own in own_settings(batch)]
        reading = {
            "num_logprobs": settings["logprobs"],
            "has_masks": self.has_masks and batch.sampling.has_sets,
            "mixtures": self.mixtures if batch.sampling.keeps_routes else None,
        }
        starts = [None] * len(prompts) if batch.starts is None else batch.starts.tolist()
        asked = zip(batch.numbers.tolist(), prompts, salts(batch), params, starts, strict=True)
        for number, prompt, salt, own, start in asked:
            salted = tokens_input(prompt, cache_salt=str(salt))
            request = await self.engine.add_request(str(number), salted, own, lora_request=self.adapter)
            self._expect(number, request.request_id, _group(number, request, start=start, **reading))


def draft_logger(counts: np.ndarray) -> Any:
    """A class of vLLM's loggers which adds to `counts`, see `EngineActor.drafts`."""
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


def _choose_interfaces(chosen: Mapping[str, str], *, spans_nodes: bool) -> None:
    """Set the variables of the network interfaces; those of this node's own environment, that of `ray start`, stay."""
    import ray

    # vLLM hands variables of NCCL's to workers on other nodes, whose interfaces may have other names.
    own = {} if spans_nodes else own_interfaces(ray.util.get_node_ip_address())
    for name, value in {**own, **chosen}.items():
        os.environ.setdefault(name, value)


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
        start: the first token of the prompt that was asked about; None: none was.
        num_logprobs: log-probabilities at each position beside the sampled token's; above 0 they show the set that was sampled from.
        has_masks: masks show it.
        mixtures: the engine says which experts it chose in these layers.
    """
    while not (output := await request.get()).finished:
        pass
    completions = sorted(output.outputs, key=lambda c: c.index)
    step = num_logprobs + 1
    logprobs = [_logprobs(completion, step) for completion in completions]
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
