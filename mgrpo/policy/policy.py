"""The policy: a model on Megatron's axes with its optimizer. Scores packs, takes training steps, shows its shards.

It does not know GRPO: `train_step` is given a loss over log-probabilities whose sum is already divided by the global
denominator, and Megatron is told not to divide again. Every method is collective over all learner ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func

from mgrpo.config.schema import Optimizer as OptimizerSettings
from mgrpo.layout import Layout
from mgrpo.models.family import ModelShape
from mgrpo.parallel import backend
from mgrpo.parallel.attention import PackedDocuments, describe
from mgrpo.policy.model import ResponseRows, build
from mgrpo.policy.schedule import learning_rate
from mgrpo.policy.weights import ShardedParameters
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
        logits_chunk: int = 0,
        trains_entropy: bool = False,
        scores_entropy: bool = False,
    ) -> None:
        self.shape, self.layout, self.dtype, self.temperature = shape, layout, dtype, temperature
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.rank = torch.distributed.get_rank()
        self.place = layout.coordinate(self.rank)
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        # Ranks that only differ in their tensor coordinate measure the same.
        self.measures = self.is_last_stage and self.place.tensor == 0
        self.model: torch.nn.Module = build(
            shape,
            layout,
            dtype,
            logits_chunk=logits_chunk,
            trains_entropy=trains_entropy,
            scores_entropy=scores_entropy,
        )
        self.parameters = ShardedParameters(self.model, shape, layout, self.rank)
        self.optimizer = None
        self._masters: dict[str, torch.Tensor] = {}

    def load(self, model_dir: str | Path) -> None:
        """Read the weights from a Hugging Face folder. Call before `prepare_training`."""
        self.parameters.load(model_dir)

    def prepare_training(self, settings: OptimizerSettings, *, num_optimizer_steps: int) -> None:
        """Make gradient buffers and the distributed optimizer (ZeRO-1)."""
        self.settings, self.num_optimizer_steps, self.optimizer_steps = settings, num_optimizer_steps, 0
        self.model = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            self.model,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.adam_beta1,
                adam_beta2=settings.adam_beta2,
                adam_eps=settings.adam_epsilon,
                clip_grad=settings.max_grad_norm,
                bf16=self.dtype is torch.bfloat16,
                params_dtype=self.dtype,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )

    def microbatches(self, packs: Sequence[PackedBatch]) -> list[Microbatch]:
        """Move packs of this rank's data-parallel slice to the device."""
        device = backend.device()

        def to_device(array: np.ndarray, dtype: type = np.int64) -> torch.Tensor:
            return torch.from_numpy(array.astype(dtype)).to(device)

        made = []
        for pack in packs:
            documents = describe(pack.cu_seqlens, pack.positions, pack.branches)
            made.append(
                Microbatch(
                    pack=pack,
                    tokens=to_device(pack.tokens)[None],
                    positions=documents.positions[None],
                    documents=documents,
                    response=ResponseRows(to_device(pack.rows), to_device(pack.targets), self.temperature),
                    loss_inputs=LossInputs(
                        to_device(pack.advantages, np.float32),
                        to_device(pack.loss_mask, np.bool_),
                        to_device(pack.response_cu_seqlens, np.int32),
                        to_device(pack.rollout_logprobs, np.float32),
                    ),
                )
            )
        return made

    @torch.no_grad()
    def score(self, microbatches: Sequence[Microbatch], name: str) -> None:
        """Log-probabilities under the present weights, left in `microbatch.logprobs[name]` on the last stage."""
        done = self._run(microbatches, lambda output, batch: output, forward_only=True)
        if self.is_last_stage:
            for microbatch, output in zip(microbatches, done, strict=True):
                microbatch.logprobs[name] = output[0]
                if len(output) > 1:
                    microbatch.entropy = output[1]

    def train_step(self, microbatches: Sequence[Microbatch], loss: LossFunction) -> StepResult:
        """Gradients of all micro-batches (equally many on every data-parallel rank), then one optimizer step."""
        self.model.zero_grad_buffer()
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
        """These weights <- alpha x the other's + (1 - alpha) x these, each rank for the shards it holds; no collective.

        Kept in fp32 between calls: in bf16 a small alpha would be rounded away.
        """
        for name, own in self.parameters.live.items():
            if name not in self._masters:
                self._masters[name] = own.data.float()
            master = self._masters[name]
            master.lerp_(other.parameters.live[name].data.float(), alpha)
            own.data.copy_(master)

    def _update_weights(self) -> float:
        """Clip and step, unless the global gradient norm, which is returned, is not finite."""
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(grad_norm):
            if self.settings.max_grad_norm > 0:
                for part in self.optimizer.chained_optimizers:
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.settings.max_grad_norm, grad_norm)
            self.optimizer.step_with_ready_grads()
        return grad_norm

    def _run(self, microbatches: Sequence[Microbatch], use: Callable, *, forward_only: bool) -> list:
        """Megatron's schedule over the micro-batches; on the last stage the list of what `use(output, microbatch)` gives."""

        def forward_step(batches, model):
            microbatch = next(batches)
            output = model(
                microbatch.tokens,
                microbatch.positions,
                documents=microbatch.documents,
                response=microbatch.response,
            )

            def finish(output: torch.Tensor, non_loss_data: bool = False):
                used = use(output, microbatch)
                if non_loss_data:
                    return used
                loss, measured = used
                return loss, torch.zeros((), dtype=torch.int, device=loss.device), measured

            return output, finish

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=self.model,
            num_microbatches=len(microbatches),
            seq_length=1,  # Stages exchange the real shapes (variable_seq_lengths).
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
