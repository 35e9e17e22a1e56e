"""The policy: a model on Megatron's axes with its optimizer. Scores packs, takes training steps, shows its shards.

It does not know GRPO: `train_step` is given a loss over log-probabilities whose sum is already divided by the global
denominator, and Megatron is told not to divide again. Every method is collective over all learner ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func

from mgrpo.config.schema import Optimizer as OptimizerSettings
from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.family import ModelShape
from mgrpo.models.table import Box
from mgrpo.parallel import axes, backend
from mgrpo.parallel.attention import PackedDocuments, describe
from mgrpo.parallel.gather import gather_values
from mgrpo.policy import holdings, shards
from mgrpo.policy.model import ResponseRows, build
from mgrpo.policy.routing import Routing, RoutingReplay
from mgrpo.policy.schedule import learning_rate
from mgrpo.policy.shards import Shard
from mgrpo.policy.weights import Read, ShardedParameters
from mgrpo.types import PackedBatch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss needs of a pack, on the device; fields as in `PackedBatch`."""

    advantages: torch.Tensor
    loss_mask: torch.Tensor
    response_cu_seqlens: torch.Tensor
    rollout_logprobs: torch.Tensor


@dataclass(slots=True)
class Microbatch:
    """A pack on this rank's device."""

    pack: PackedBatch
    tokens: torch.Tensor
    positions: torch.Tensor
    documents: PackedDocuments
    response: ResponseRows
    loss_inputs: LossInputs
    logprobs: dict[str, torch.Tensor] = field(default_factory=dict)
    """Scores given earlier by the reference ("ref") or by the policy itself ("old"), on the last stage: `[responses]`."""
    entropy: torch.Tensor | None = None
    """With the score of the policy that `scores_entropy`, `[responses]`."""
    keep: torch.Tensor | None = None
    """`[responses]`, a factor of the loss's policy term."""
    routing: Routing = field(default_factory=dict)
    """Which experts were chosen in the score that recorded it; replayed in training."""


LossFunction = Callable[[torch.Tensor, torch.Tensor, Microbatch], tuple[torch.Tensor, Any]]
"""(logprobs [responses], entropy [responses], micro-batch) -> (loss / global denominator, anything to report)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step reports; all but `measured` is equal on all ranks."""

    measured: list[Any]
    """What the loss reported for each micro-batch; empty before the last stage."""
    grad_norm: float
    learning_rate: float
    is_finite: bool
    """False when the gradient was not finite and the step was skipped."""


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
        logits_chunk: int = 0,
        trains_entropy: bool = False,
        scores_entropy: bool = False,
    ) -> None:
        self.shape, self.layout, self.dtype, self.temperature = shape, layout, dtype, temperature
        self.parallel = settings or Parallel()
        if not parallel_state.model_parallel_is_initialized():
            axes.make_groups(layout, seed=seed)
        self.rank = torch.distributed.get_rank()
        self.place = layout.coordinate(self.rank)
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        # Ranks that only differ in their tensor or context coordinate measure the same.
        self.measures = self.is_last_stage and self.place.tensor == 0 and self.place.context == 0
        self.chunks: list[torch.nn.Module] = build(
            shape,
            layout,
            dtype,
            settings=self.parallel,
            logits_chunk=logits_chunk,
            trains_entropy=trains_entropy,
            scores_entropy=scores_entropy,
        )
        self.routing = RoutingReplay(self.chunks)
        self.parameters = ShardedParameters(self.chunks, shape, layout, self.rank)
        self.optimizer = None
        self._masters: dict[str, torch.Tensor] = {}

    def load(self, read: Read) -> None:
        """Fill this rank's weights with the boxes that `read` gives. Call before `prepare_training`."""
        self.parameters.load(read)

    def load_masters(self, read: Read) -> None:
        """As `load`, keeping the values also in float32, which `move_towards` goes on from."""
        self.load(read)
        for name, place in self.parameters.places.items():
            master = self._masters[name] = torch.zeros(place.shape, device=backend.device())
            for piece in place.pieces:
                master[piece.region] = read(piece.box).to(master)

    @property
    def has_moved(self) -> bool:
        """Whether there are float32 copies: `move_towards` was called, now or before the state that was loaded."""
        return bool(self._masters)

    def master_boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every box of the float32 copies that `move_towards` keeps, a tied head's copy of the embedding apart."""
        for name, place in self.parameters.places.items():
            if not place.is_copy:
                for piece in place.pieces:
                    yield piece.box, self._masters[name][piece.region]

    def prepare_training(self, settings: OptimizerSettings, *, num_optimizer_steps: int) -> None:
        """Make gradient buffers and the optimizer, sharded as `layout.zero_stage` says."""
        self.settings, self.num_optimizer_steps = settings, num_optimizer_steps
        self.optimizer_steps = self.num_updates = 0
        names = {parameter: name for name, parameter in self.parameters.live.items()}
        self.chunks = shards.wrap(self.chunks, self.layout)
        self.optimizer = shards.make_optimizer(self.chunks, self.layout, self.dtype, settings, self.parallel)
        self.shards = shards.shards(self.optimizer, self.chunks, names)

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every box of an HF tensor that this rank holds, with the live view of it; float32 masters where it holds
        nothing else of a parameter whole (ZeRO-2 and 3).
        """
        if self.optimizer is None or self.layout.sharding < 2:
            yield from self.parameters.boxes()
            return
        for shard in self.shards:
            place = self.parameters.places[shard.name]
            if not place.is_copy:
                yield from shard.boxes(place, shard.main)

    def holdings(self, group: torch.distributed.ProcessGroup) -> list[list[Box]]:
        """For each rank the boxes that its `boxes` gives. All ranks of `group`, on the CPU, must call."""
        own = [(0, box) for box, _ in self.boxes()]
        return [[box for _, box in held] for held in holdings.everyones(own, self.shape, group)]

    def microbatches(self, packs: Sequence[PackedBatch]) -> list[Microbatch]:
        """Move packs of this rank's data-parallel slice to the device."""
        device = backend.device()

        def to_device(array: np.ndarray, dtype: type = np.int64) -> torch.Tensor:
            return torch.from_numpy(array.astype(dtype)).to(device)

        made = []
        for pack in packs:
            documents = describe(
                pack.cu_seqlens, pack.positions, pack.branches, rank=self.place.context, size=self.layout.context
            )
            tokens = pack.tokens[documents.share.tokens]
            made.append(
                Microbatch(
                    pack=pack,
                    tokens=to_device(tokens)[None],
                    positions=documents.positions[None],
                    documents=documents,
                    response=self._response_rows(pack, documents),
                    loss_inputs=LossInputs(
                        to_device(pack.advantages, np.float32),
                        to_device(pack.loss_mask, np.bool_),
                        to_device(pack.response_cu_seqlens, np.int32),
                        to_device(pack.rollout_logprobs, np.float32),
                    ),
                )
            )
        return made

    def _response_rows(self, pack: PackedBatch, documents: PackedDocuments) -> ResponseRows:
        device = backend.device()
        rows, targets = (torch.from_numpy(array.astype(np.int64)) for array in (pack.rows, pack.targets))
        if documents.own is None:
            return ResponseRows(rows.to(device), targets.to(device), self.temperature)
        here = torch.full((len(pack.tokens),), -1)
        here[documents.share.tokens] = torch.arange(len(documents.share.tokens))
        places = (here[rows] >= 0).nonzero()[:, 0]
        return ResponseRows(
            here[rows[places]].to(device),
            targets[places].to(device),
            self.temperature,
            places=places.to(device),
            num_responses=len(rows),
        )

    @torch.no_grad()
    def score(self, microbatches: Sequence[Microbatch], name: str, *, records_routing: bool = False) -> None:
        """Log-probabilities under the present weights, left in `microbatch.logprobs[name]` on the last stage.

        With `records_routing` a later `train_step` on these micro-batches replays the experts chosen here, if the model
        was built for it (`moe_enable_routing_replay`).
        """
        if records_routing:
            self.routing.record()
        done = self._run(microbatches, lambda output, batch: output, forward_only=True)
        if self.is_last_stage:
            for microbatch, output in zip(microbatches, done, strict=True):
                microbatch.logprobs[name] = output[0]
                if len(output) > 1:
                    microbatch.entropy = output[1]

    def train_step(self, microbatches: Sequence[Microbatch], loss: LossFunction) -> StepResult:
        """Gradients of all micro-batches (equally many on every data-parallel rank), then one optimizer step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def weigh(output: torch.Tensor, microbatch: Microbatch) -> tuple[torch.Tensor, Any]:
            return loss(output[0], output[1], microbatch)

        measured = self._run(microbatches, weigh, forward_only=False)
        rate = learning_rate(self.settings, self.optimizer_steps, self.num_optimizer_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            # Megatron marks biases and norms with wd_mult 0 and leaves it to its scheduler, not used here, to apply it.
            exempt = 1.0 if self.settings.set_weight_decay_on_bias_and_norm else group.get("wd_mult", 1.0)
            group["weight_decay"] = self.settings.weight_decay * exempt
        grad_norm = self._update_weights()
        self.optimizer_steps += 1
        return StepResult(
            measured=measured if self.is_last_stage else [],
            grad_norm=grad_norm,
            learning_rate=rate,
            is_finite=math.isfinite(grad_norm),
        )

    def pass_over(self, optimizer_steps: int) -> None:
        """Steps that had nothing to train on: the learning rate goes on as planned. No collective."""
        self.optimizer_steps += optimizer_steps

    @torch.no_grad()
    def move_towards(self, other: Policy, alpha: float) -> None:
        """These weights <- alpha x the other's + (1 - alpha) x these, each rank for the shards it holds.

        Kept in fp32 between calls: in bf16 a small alpha would be rounded away.
        """
        for name, own in self.parameters.live.items():
            if name not in self._masters:
                self._masters[name] = own.data.float()
            master = self._masters[name]
            master.lerp_(other.parameter(name).float(), alpha)
            own.data.copy_(master)

    def parameter(self, name: str) -> torch.Tensor:
        """One local parameter, whole; under ZeRO-2 and 3 all ranks that share it must call."""
        if self.optimizer is None or self.layout.sharding < 2:
            return self.parameters.live[name].data
        own = self._shard(name)
        return self._whole(name, own.main if own else None)

    def _shard(self, name: str) -> Shard | None:
        """This rank's shard of a parameter; None where it has no element of it."""
        return next((shard for shard in self.shards if shard.name == name), None)

    def _whole(self, name: str, run: torch.Tensor | None) -> torch.Tensor:
        """A parameter, or its gradient, from the runs of all ranks that share it, which must all call."""
        if run is None:
            run = torch.zeros(0, device=backend.device())
        whole = gather_values(run, shards.data_parallel_group(name, self.layout))
        return whole.view(self.parameters.places[name].shape)

    def _update_weights(self) -> float:
        """Clip and step, unless the global gradient norm, which is returned, is not finite."""
        self.optimizer.prepare_grads()
        self._sum_tied_gradients()
        grad_norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(grad_norm):
            if self.settings.max_grad_norm > 0:
                for part in shards.parts(self.optimizer):
                    clip_grad_by_total_norm_fp32(
                        part.get_parameters(),
                        self.settings.max_grad_norm,
                        grad_norm,
                        use_decoupled_grad=part.config.use_precision_aware_optimizer,
                    )
            self.optimizer.step_with_ready_grads()
            self.num_updates += 1
        return grad_norm

    def _sum_tied_gradients(self) -> None:
        """Under ZeRO-2 and 3: add up what the first and the last stage's copy of a tied embedding collected."""
        if not self.shape.tied or self.layout.pipeline == 1 or self.layout.sharding < 2:
            return
        name = next(
            (n for n in ("embedding.word_embeddings.weight", "output_layer.weight") if n in self.parameters.live), ""
        )
        if not name:
            return
        own = self._shard(name)
        whole = self._whole(name, own.gradient if own else None)
        torch.distributed.all_reduce(whole, group=parallel_state.get_embedding_group())
        if own:
            own.gradient.copy_(whole.view(-1)[own.start : own.start + len(own.main)])

    def _run(self, microbatches: Sequence[Microbatch], use: Callable, *, forward_only: bool) -> list:
        """Megatron's schedule over the micro-batches; on the last stage the list of what `use(output, microbatch)` gives."""

        number = {id(chunk): index for index, chunk in enumerate(self.chunks)}

        def forward_step(batches, model):
            microbatch = next(batches)
            chunk = number[id(model)]
            if not forward_only and chunk in microbatch.routing:
                self.routing.replay(chunk, microbatch.routing[chunk])
            output = model(
                microbatch.tokens,
                microbatch.positions,
                documents=microbatch.documents,
                response=microbatch.response,
            )
            if self.routing.is_recording:
                microbatch.routing[chunk] = self.routing.recorded(chunk)

            def finish(output: torch.Tensor, non_loss_data: bool = False):
                used = use(output, microbatch)
                if non_loss_data:
                    return used
                loss, measured = used
                return loss, torch.zeros((), dtype=torch.int, device=loss.device), measured

            return output, finish

        # One stage's chunks are called in turn, each through the same micro-batches.
        iterators = [iter(microbatches) for _ in self.chunks]
        is_interleaved = len(self.chunks) > 1
        done = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if is_interleaved else iterators[0],
            model=self.chunks if is_interleaved else self.chunks[0],
            num_microbatches=len(microbatches),
            seq_length=1,  # Stages exchange the real shapes (variable_seq_lengths).
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        self.routing.choose_freely()
        return done
