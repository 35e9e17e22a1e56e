"""Gradient buffers and Adam around the model's chunks, sharded by the ZeRO stage, and the update of the weights.

Unless noted, every method is collective over all learner ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch.autograd.profiler import record_function

from mgrpo.config.schema import Optimizer as OptimizerSettings
from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.parallel import backend, fsdp, gradients
from mgrpo.parallel.gather import gather_values
from mgrpo.policy.learning_rate import learning_rate
from mgrpo.policy.loss_scale import LossScale
from mgrpo.policy.model import ResponseModel
from mgrpo.policy.parameters import ShardedParameters
from mgrpo.policy.shards import MOMENTS, Shard, chained, data_parallel_group, local_part, local_shards

WrappedChunk: TypeAlias = DistributedDataParallel | fsdp.FullyShardedDataParallel
_TIED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""The copies of a tied embedding, on the first and the last pipeline stage."""


class PolicyOptimizer:
    """Megatron's optimizer over this rank's chunks, which it wraps.

    Args:
        dtype: type of the model's parameters; masters are float32.
        num_optimizer_steps: length of the learning rate's schedule.
    """

    def __init__(
        self,
        chunks: Sequence[ResponseModel],
        parameters: ShardedParameters,
        *,
        dtype: torch.dtype,
        settings: OptimizerSettings,
        parallel: Parallel,
        num_optimizer_steps: int,
    ) -> None:
        self.parameters, self.layout = parameters, parameters.layout
        self.settings, self.num_optimizer_steps = settings, num_optimizer_steps
        # Without CUDA the states are in host memory already.
        self.is_offloaded = parallel.optimizer_cpu_offload and backend.has_cuda()
        names = {p: name for name, p in parameters.live.items() if isinstance(p, torch.nn.Parameter)}
        self.chunks = _wrap(chunks, self.layout)
        self._buckets = _buckets(self.chunks) if self.layout.sharding == 1 else []
        self._megatron = _make_adam(self.chunks, self.layout, dtype, settings, parallel, is_offloaded=self.is_offloaded)
        self.shards = local_shards(self._megatron, self.chunks, names)
        self.loss_scale = LossScale.of(self._megatron, self.chunks[0].config) if dtype is torch.float16 else None

    def zero_gradients(self) -> None:
        """Discard the gradients of the previous step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            chunk.has_summed_gradients = False
        self._megatron.zero_grad()

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step `step` (from 0)."""
        return learning_rate(self.settings, step, self.num_optimizer_steps)

    def set_learning_rate(self, step: int) -> float:
        """Prepare the update of optimizer step `step` (from 0); its learning rate. Not collective."""
        rate = self.learning_rate(step)
        for group in self._megatron.param_groups:
            group["lr"] = rate
            # Megatron marks biases and norms with wd_mult 0, which its scheduler, not used here, would apply.
            factor = 1.0 if self.settings.set_weight_decay_on_bias_and_norm else group.get("wd_mult", 1.0)
            group["weight_decay"] = self.settings.weight_decay * factor
        return rate

    @record_function("mgrpo: update")
    def update(self) -> float:
        """Clip and step, unless the global gradient norm, which is returned, is not finite."""
        self._megatron.prepare_grads()
        if self.loss_scale and self.loss_scale.unscale([shard.gradient for shard in self.shards]):
            return math.inf
        self._sum_tied_gradients()
        grad_norm = float(self._megatron.get_grad_norm())
        if math.isfinite(grad_norm):
            if self.settings.max_grad_norm > 0:
                for single in chained(self._megatron):
                    clip_grad_by_total_norm_fp32(
                        single.get_parameters(),
                        self.settings.max_grad_norm,
                        grad_norm,
                        use_decoupled_grad=single.config.use_precision_aware_optimizer,
                    )
            with backend.host_threads() if self.is_offloaded else nullcontext():
                self._step()
        return grad_norm

    def _step(self) -> None:
        if self.layout.sharding != 1:
            self._megatron.step_with_ready_grads()
            return
        # Each of the chained optimizers would gather the parameters of all.
        for single in chained(self._megatron):
            MixedPrecisionOptimizer.step_with_ready_grads(single)
        for bucket in self._buckets:
            bucket.start_param_sync()

    def wait_for_weights(self) -> None:
        """Wait until all weights have come that the last update gathers. Not collective.

        A forward pass waits by itself, module by module. `shards` are this rank's own part and always current.
        """
        _wait_for(self._buckets)

    def parameter_memory(self) -> list[torch.Tensor]:
        """Tensors over all memory of this rank's parameters between steps. Not collective."""
        if self.layout.sharding < 3:
            return [parameter.data for parameter in self.parameters.live.values()]
        return [group.model_weight_buffer.data for group in self._fsdp_groups()]

    def state_memory(self) -> list[torch.Tensor]:
        """The same of masters, where there are any besides the parameters, and of Adam's states."""
        tensors = [shard.main for shard in self.shards]
        for shard in self.shards:
            states = shard.optimizer.state[shard.parameter].values()
            tensors += [local_part(state) for state in states if isinstance(state, torch.Tensor)]
        return tensors

    def gradient_memory(self) -> list[torch.Tensor]:
        """The same of gradients."""
        if self.layout.sharding < 2:
            return [
                buffer.grad_data for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers
            ]
        # The second is megatron-core 0.16's, where gradients have replicas.
        own = [(group.main_grad_buffer, getattr(group, "hsdp_gbuf", None)) for group in self._fsdp_groups()]
        return [buffer.data for buffers in own for buffer in buffers if buffer]

    def _fsdp_groups(self) -> list[Any]:
        """Megatron-FSDP's groups of parameters, each with its buffers."""
        return [group for chunk in self.chunks for group in chunk.param_and_grad_buffer.parameter_groups]

    def discard_transients(self) -> None:
        """Free gradients outside the buffers, and under ZeRO-3 parameters that are gathered ahead of a forward pass, which
        gathers them again. Not collective."""
        self._megatron.zero_grad()
        for chunk in self.chunks if self.layout.sharding == 3 else ():
            pipeline = chunk.module.all_gather_pipeline
            for bucket in list(pipeline.param_gather_event_map):
                pipeline.wait_bucket_ready(*bucket)
            # megatron-core 0.19 would keep the parameters outside of layers whole.
            takes = inspect.signature(pipeline.reset).parameters
            pipeline.reset(**({"preserve_non_fsdp_units": False} if takes else {}))

    def parameter(self, name: str) -> torch.Tensor:
        """One local parameter, whole, from the shards of all ranks that share it, which must all call."""
        shard = self._shard(name)
        return self._whole(name, shard.main if shard else None)

    def _shard(self, name: str) -> Shard | None:
        """This rank's shard of a parameter; None where it has no element of it."""
        return next((shard for shard in self.shards if shard.name == name), None)

    def _whole(self, name: str, elements: torch.Tensor | None) -> torch.Tensor:
        """A parameter, or its gradient, from the elements of all ranks that share it, which must all call."""
        if elements is None:
            elements = torch.zeros(0, device=backend.device())
        return gather_values(elements, data_parallel_group(name, self.layout)).view(self.parameters.places[name].shape)

    def _sum_tied_gradients(self) -> None:
        """Under ZeRO-2 and 3: add up the gradients of a tied embedding's copies on the first and the last stage."""
        if not self.parameters.shape.tied or self.layout.pipeline == 1 or self.layout.sharding < 2:
            return
        name = next((name for name in _TIED if name in self.parameters.live), None)
        if name is None:
            return
        shard = self._shard(name)
        whole = self._whole(name, shard.gradient if shard else None)
        torch.distributed.all_reduce(whole, group=parallel_state.get_embedding_group())
        if shard:
            shard.gradient.copy_(whole.view(-1)[shard.start : shard.start + len(shard.main)])


def _wrap(chunks: Sequence[ResponseModel], layout: Layout) -> list[WrappedChunk]:
    """Gradient buffers around the model's chunks, sharded by the stage."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=layout.sharding == 1,
        use_distributed_optimizer=layout.sharding > 0,
        num_distributed_optimizer_instances=layout.data * layout.context // layout.num_shards,
    )
    wrapped: list[WrappedChunk]
    if layout.sharding >= 2:
        wrapped = [*_shard(chunks, config, layout)]
    else:
        # Later chunks of a stage need no buckets: earlier ones have their backward passes after them.
        wrapped = [
            DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        if config.overlap_param_gather:
            _wait_before_use(wrapped)
    # Gradients are summed once, after the last micro-batch: the schedule must name it.
    no_sync = [chunk.no_sync for chunk in wrapped]
    wrapped[0].config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


def _buckets(chunks: Sequence[DistributedDataParallel]) -> list[BucketGroup]:
    """Megatron's buckets of weights in the order in which a forward pass needs them."""
    return list(
        dict.fromkeys(
            chunk.param_to_bucket_group[parameter]
            for chunk in chunks
            for parameter in chunk.parameters()
            if parameter.requires_grad
        )
    )


def _wait_before_use(chunks: Sequence[DistributedDataParallel]) -> None:
    """Make each module wait for the buckets of its own weights before its forward pass."""
    for chunk in chunks:
        # Megatron's hooks also gather: before the first update, and after one that was skipped.
        chunk.disable_forward_pre_hook(param_sync=False)
        for module in chunk.module.modules():
            trained = [own for own in module.parameters(recurse=False) if own.requires_grad]
            if buckets := {chunk.param_to_bucket_group[own] for own in trained}:
                module.register_forward_pre_hook(partial(_wait_for, buckets))


def _wait_for(buckets: Iterable[BucketGroup], *call: Any) -> None:
    """Wait for those of the buckets' gathers that are under way; on CUDA the stream waits, not the host."""
    for bucket in buckets:
        if bucket.param_gather_handle is not None:
            bucket.finish_param_sync(skip_next_bucket_dispatch=True)


def _shard(
    chunks: Sequence[ResponseModel], config: DistributedDataParallelConfig, layout: Layout
) -> Iterator[fsdp.FullyShardedDataParallel]:
    """Megatron-FSDP around the chunks, for ZeRO-2 and 3."""
    fsdp.install()
    config.use_megatron_fsdp = True
    # megatron-core 0.16 goes by `grad_reduce_in_fp32`; 0.19 would keep and sum gradients in the weights' type.
    config.megatron_fsdp_main_grads_dtype = torch.float32
    config.data_parallel_sharding_strategy = "optim_grads" if layout.sharding == 2 else "optim_grads_params"
    config.overlap_param_gather = layout.sharding == 3
    largest_layer = max(
        sum(parameter.numel() for parameter in layer.parameters()) for chunk in chunks for layer in chunk.decoder.layers
    )
    # In one bucket ZeRO-2 would have all gradients whole at once.
    config.bucket_size = largest_layer
    # Gathered at a time: the layer in use and the next one. Megatron's default is at least a billion elements.
    config.suggested_communication_unit_size = 2 * largest_layer
    for chunk in chunks:
        yield fsdp.FullyShardedDataParallel(chunk.config, config, chunk)


def _make_adam(
    chunks: Sequence[WrappedChunk],
    layout: Layout,
    dtype: torch.dtype,
    settings: OptimizerSettings,
    parallel: Parallel,
    *,
    is_offloaded: bool,
) -> MegatronOptimizer:
    gradients.install()
    moment_dtypes = {f"{name}_dtype": getattr(torch, getattr(parallel, f"{name}_dtype")) for name in MOMENTS}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_epsilon,
            clip_grad=settings.max_grad_norm,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            params_dtype=dtype,
            use_distributed_optimizer=layout.sharding > 0,
            optimizer_cpu_offload=is_offloaded,
            optimizer_offload_fraction=parallel.optimizer_offload_fraction if is_offloaded else 0.0,
            use_precision_aware_optimizer=parallel.use_precision_aware_optimizer,
            **moment_dtypes,
        ),
        list(chunks),
        use_gloo_process_groups=False,
    )
    for single in chained(optimizer):
        adam = getattr(single, "optimizer", None)
        # Offloaded, it is one for the host's weights and one for the device's.
        for part in getattr(adam, "sub_optimizers", [adam]):
            if isinstance(part, torch.optim.Adam):
                # One kernel instead of a dozen, and no temporary as large as the update.
                for group in part.param_groups:
                    group["fused"] = True
    return optimizer
