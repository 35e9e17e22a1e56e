"""The policy: a model on Megatron's axes with its optimizer. It scores packs, trains and exposes its weights.

It is independent of GRPO: `train_step` takes a loss over log-probabilities whose sum is already divided by the global
denominator, and Megatron does not divide again. Every method is collective over all learner ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from megatron.core import parallel_state

from mgrpo.config.schema import Optimizer as OptimizerSettings
from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.adapters import LoraShape, are_apart, sent_tensors
from mgrpo.models.placement.box_table import HeldBoxes, Tensors
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors
from mgrpo.parallel import axes
from mgrpo.parallel.moe.expert_loads import ExpertLoads
from mgrpo.policy import passes
from mgrpo.policy.lora_policy import Adapters, MergedSlice, made, settings_with_adapters
from mgrpo.policy.loss_scale import LossScale
from mgrpo.policy.microbatch import Microbatch, MicrobatchLoss, Reported, Taught, collate
from mgrpo.policy.model import ResponseModel, build
from mgrpo.policy.offload import Offload
from mgrpo.policy.optimizer import PolicyOptimizer, WrappedChunk
from mgrpo.policy.parameters import ShardedParameters, gather_held
from mgrpo.policy.routing import RoutingReplay
from mgrpo.policy.shards import Shard
from mgrpo.policy.weights import Read
from mgrpo.types import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(Generic[Reported]):
    """The result of one optimizer step; equal on all ranks except `measured`."""

    measured: list[Reported]
    """The loss's report for each micro-batch; empty before the last stage."""
    grad_norm: float
    learning_rate: float
    is_finite: bool
    """False when the gradient was not finite and the step was skipped."""
    loss_scale: float | None = None
    """Factor of the loss; None except in float16."""
    has_overflowed: bool = False
    """True if the step was skipped and the next one has a smaller loss scale."""


class Policy:
    """One rank's part of the policy."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        *,
        dtype: torch.dtype,
        seed: int,
        temperature: float,
        settings: Parallel | None = None,
        lora: LoraShape | None = None,
        logits_chunk: int = 0,
        fp32_logits: bool = False,
        trains_entropy: bool = False,
        scores_entropy: bool = False,
    ) -> None:
        """
        Args:
            lora: low-rank adapters, which are trained instead of the model's own weights.
        """
        self.shape, self.layout, self.dtype, self.temperature = shape, layout, dtype, temperature
        self.parallel, self.lora = settings or Parallel(), lora
        if lora:
            self.parallel = settings_with_adapters(self.parallel, layout)
        if not parallel_state.model_parallel_is_initialized():
            axes.make_groups(layout, seed=seed)
            if self.parallel.tp_comm_overlap:
                tokens = layout.round_up(self.parallel.pack_length) // layout.context
                axes.make_buffers(
                    layout, tokens=tokens, hidden=shape.hidden, dtype=dtype, in_8_bits=self.parallel.fp8 != "none"
                )
        self.rank = torch.distributed.get_rank()
        self.coordinate = layout.coordinate(self.rank)
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        # Ranks that differ only in their tensor or context coordinate have the same metrics.
        self.reports_metrics = self.is_last_stage and self.coordinate.tensor == 0 and self.coordinate.context == 0
        chunks = build(
            shape,
            layout,
            dtype,
            settings=self.parallel,
            logits_chunk=logits_chunk,
            fp32_logits=fp32_logits,
            trains_entropy=trains_entropy,
            scores_entropy=scores_entropy,
        )
        self.chunks: Sequence[ResponseModel | WrappedChunk] = chunks
        self.routing = RoutingReplay(chunks, shape, layout, self.coordinate)
        self.expert_loads = shape.experts and ExpertLoads(
            chunks, self.routing.columns, num_layers=self.routing.num_layers, num_experts=shape.experts.count
        )
        self.parameters = ShardedParameters(chunks, shape, layout, self.rank)
        self.adapters = Adapters(chunks, self.parameters, lora, seed=seed) if lora else None
        self.optimizer: PolicyOptimizer | None = None
        self.optimizer_steps = self.num_updates = 0
        self._offload = Offload()

    def load(self, read: Read) -> None:
        """Fill the model's own weights on this rank with the values that `read` returns. Call before `prepare_training`."""
        self.parameters.load(self.parameters.model, read)

    def load_adapters(self, read: Read) -> None:
        """Fill adapters, which otherwise start from those of the seed, with the values that `read` returns, in the same way."""
        self.parameters.load(self.parameters.added, read)

    def adapters_off(self) -> AbstractContextManager[None]:
        """Disable the adapters within the block, if the policy has any. Not collective."""
        return self.adapters.off() if self.adapters else nullcontext()

    def prepare_training(self, settings: OptimizerSettings, *, num_optimizer_steps: int) -> None:
        """Make gradient buffers and the optimizer, sharded by `layout.zero_stage`."""
        self.optimizer_steps = self.num_updates = 0
        self.optimizer = PolicyOptimizer(
            self.chunks,
            self.parameters,
            dtype=self.dtype,
            settings=settings,
            parallel=self.parallel,
            num_optimizer_steps=num_optimizer_steps,
        )
        self.chunks = self.optimizer.chunks

    @property
    def loss_scale(self) -> LossScale | None:
        """The factor of the loss; only in float16, after `prepare_training`."""
        return self.optimizer.loss_scale if self.optimizer else None

    @property
    def shards(self) -> list[Shard]:
        """The elements that this rank's optimizer updates; empty before `prepare_training`."""
        return self.optimizer.shards if self.optimizer else []

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every box of an HF tensor of the model that this rank holds, each with its live view; float32 where `is_frozen`.

        Under ZeRO-2 and 3 these are the float32 masters of its shards. With adapters they are the merged weights, made one at a
        time.
        """
        yield from made(self.live_boxes())

    def live_boxes(self) -> Iterator[tuple[Box, torch.Tensor | MergedSlice]]:
        """The same for a reader that comes back: merged weights are made when they are read."""
        self.wait_for_weights()
        if self.layout.sharding >= 2 and self.optimizer:
            for shard in self.optimizer.shards:
                place = self.parameters.places[shard.name]
                if not place.is_copy:
                    yield from shard.boxes(place, shard.main)
            yield from self.parameters.boxes(self.parameters.frozen)
        elif self.adapters:
            yield from self.adapters.live_boxes()
        else:
            yield from self.parameters.boxes(self.parameters.model)

    def sync_boxes(self) -> Iterator[tuple[Box, torch.Tensor | MergedSlice]]:
        """Every box of this rank that engines hold: of the model, and of A and scale B where they are not merged; see `live_boxes`."""
        if self.adapters and are_apart(self.lora):
            self.wait_for_weights()
            yield from self.parameters.boxes(self.parameters.model)
            yield from self.adapters.sent_boxes()
        else:
            yield from self.live_boxes()

    def adapter_boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every box of an adapter tensor that this rank holds, each with its live view."""
        self.wait_for_weights()
        yield from self.parameters.boxes(self.parameters.added)

    def wait_for_weights(self) -> None:
        """Call before reading weights through views taken before the last update. Not collective."""
        if self.optimizer:
            self.optimizer.wait_for_weights()

    def offload(self, *, keep_boxes: bool = False) -> int:
        """Free this rank's device memory of parameters, gradients, masters and moments until `restore`. Not collective.

        Args:
            keep_boxes: memory behind the views of `boxes` stays; a second call may free it as well.
        Returns:
            Bytes of the device that were freed.
        """
        self.wait_for_weights()
        stay: list[torch.Tensor] = []
        if keep_boxes and self.layout.sharding >= 2 and self.optimizer:
            stay = [shard.main for shard in self.optimizer.shards]
        elif keep_boxes:
            stay = [parameter.data for parameter in self.parameters.live.values()]
        parameters, dropped = [parameter.data for parameter in self.parameters.live.values()], []
        if self.optimizer:
            if not self._offload.is_offloaded:
                self.optimizer.discard_transients()
            parameters, dropped = self.optimizer.parameter_memory(), self.optimizer.gradient_memory()
        return self._offload.offload(self.state_memory() + parameters, but=stay, dropped=dropped)

    def state_memory(self) -> list[torch.Tensor]:
        """Tensors over all memory of the optimizer's states, without parameters and gradients. Not collective."""
        return self.optimizer.state_memory() if self.optimizer else []

    def restore(self) -> None:
        """Take the memory of the last `offload`, if any, with the same values. Not collective."""
        self._offload.restore()

    @torch.no_grad()
    def not_finite(self) -> list[str]:
        """HF tensors of which this rank holds a value that is not finite or whose square overflows float32. Not collective."""
        names, norms = [], []
        for box, values in itertools.chain(self.boxes(), self.adapter_boxes()):
            names.append(box.name)
            norms.append(torch.linalg.vector_norm(values, dtype=torch.float32))
        # One transfer from the device for all of them.
        is_finite = torch.stack(norms).isfinite().tolist() if norms else []
        return [name for name, good in zip(names, is_finite, strict=True) if not good]

    def holdings(self, group: torch.distributed.ProcessGroup) -> HeldBoxes:
        """The boxes that each rank's `sync_boxes` gives. All ranks of `group`, on the CPU, must call."""
        tensors = hf_tensors(self.shape) | sent_tensors(self.shape, self.lora)
        return gather_held((box for box, _ in self.sync_boxes()), Tensors(tensors), group)

    def microbatches(self, packs: Sequence[PackedBatch]) -> list[Microbatch]:
        """Move packs of this rank's data-parallel slice to the device."""
        return [
            collate(pack, self.layout, context_rank=self.coordinate.context, temperature=self.temperature)
            for pack in packs
        ]

    @torch.no_grad()
    def score(self, microbatches: Sequence[Microbatch], name: str, *, replays_routing: bool = False) -> None:
        """Log-probabilities under the current weights, stored in `microbatch.logprobs[name]` on the last stage.

        With `replays_routing` under the same experts as a later `train_step` on these micro-batches, as `routing_replay` selects:
        those of the engines, or those chosen here.
        """
        if replays_routing and self.parallel.routing_replay == "learner":
            self.routing.record()
        outputs = passes.forward(self.chunks, microbatches, routing=self.routing, replays=replays_routing)
        if self.is_last_stage:
            for microbatch, output in zip(microbatches, outputs, strict=True):
                microbatch.logprobs[name] = output[0]
                if len(output) > 1:
                    microbatch.entropy = output[1]

    @torch.no_grad()
    def teach(
        self, microbatches: Sequence[Microbatch], *, num_likeliest: int = 0, temperature: float | None = None
    ) -> list[Taught]:
        """Scores of the micro-batches' tokens under this model as teacher, for each; empty before the last stage.

        Args:
            num_likeliest: likeliest tokens to return besides the own ones; from the sampling mask where there is one.
            temperature: divisor of its logits, whatever the micro-batches give; None: its own.
        """
        divisor = temperature or self.temperature
        asked = [
            replace(batch, response=replace(batch.response, temperature=divisor, num_likeliest=num_likeliest))
            for batch in microbatches
        ]
        outputs = passes.forward(self.chunks, asked, routing=self.routing)
        return [Taught.of(output, num_likeliest) for output in outputs] if self.is_last_stage else []

    def train_step(
        self,
        microbatches: Sequence[Microbatch],
        loss: MicrobatchLoss[Reported],
    ) -> StepResult[Reported]:
        """Gradients of all micro-batches (equally many on every data-parallel rank), then one optimizer step."""
        assert self.optimizer is not None, "call prepare_training first"
        self.optimizer.zero_gradients()
        microbatches = [batch.with_candidates() for batch in microbatches]
        measured = passes.forward_backward(self.chunks, microbatches, loss, routing=self.routing)
        rate = self.optimizer.set_learning_rate(self.optimizer_steps)
        loss_scale = self.loss_scale.value if self.loss_scale else None
        grad_norm = self.optimizer.update()
        is_finite = math.isfinite(grad_norm)
        self.optimizer_steps += 1
        self.num_updates += is_finite
        return StepResult(
            measured=measured if self.is_last_stage else [],
            grad_norm=grad_norm,
            learning_rate=rate,
            is_finite=is_finite,
            loss_scale=loss_scale,
            has_overflowed=self.loss_scale is not None and self.loss_scale.follow(is_finite=is_finite),
        )

    def learning_rate(self) -> float:
        """The learning rate of the next update. Not collective."""
        assert self.optimizer is not None, "call prepare_training first"
        return self.optimizer.learning_rate(self.optimizer_steps)

    def counters(self) -> dict[str, Any]:
        """The part of a training state besides tensors, in JSON. Not collective."""
        return {
            "optimizer_steps": self.optimizer_steps,
            "num_updates": self.num_updates,
            "loss_scale": self.loss_scale and self.loss_scale.state(),
        }

    def restore_counters(self, saved: Mapping[str, Any]) -> None:
        """Continue from `counters`; a state of another dtype has no loss scale. Not collective."""
        self.optimizer_steps, self.num_updates = saved["optimizer_steps"], saved["num_updates"]
        if self.loss_scale and saved.get("loss_scale"):
            self.loss_scale.restore(saved["loss_scale"])

    def pass_over(self, optimizer_steps: int) -> None:
        """Count steps without anything to train on, so that the learning rate follows its schedule. Not collective."""
        self.optimizer_steps += optimizer_steps

    def parameter(self, name: str) -> torch.Tensor:
        """One local parameter, whole; under ZeRO-2 and 3 all ranks that share it must call."""
        if self.optimizer is None or self.layout.sharding < 2 or name in self.parameters.frozen:
            self.wait_for_weights()
            return self.parameters.live[name].data
        return self.optimizer.parameter(name)
