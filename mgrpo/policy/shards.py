"""What this rank's optimizer holds: for each parameter the run of elements it updates, whatever the ZeRO stage.

Megatron keeps these runs in a different place for each of its optimizers; the rest of the package sees only `Shard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.tensor import DTensor

from mgrpo.config.schema import Optimizer as OptimizerSettings
from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.table import Box, LocalParameter
from mgrpo.parallel import backend, fsdp

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements `start : start + len(main)` of a parameter, counted row by row."""

    name: str
    """The parameter's, as in the rule table."""
    start: int
    main: torch.Tensor
    """`[n]` float32, what the optimizer updates."""
    parameter: torch.Tensor
    """The optimizer's own parameter, whose gradient and state these are."""
    optimizer: torch.optim.Optimizer

    @property
    def gradient(self) -> torch.Tensor:
        """`[n]` float32, summed over all axes, between the backward pass and the next step."""
        return _local(self.parameter.grad)

    def moment(self, kind: str) -> torch.Tensor:
        """`[n]`: Adam's "exp_avg" or "exp_avg_sq"; made with zeros when there has been no step yet."""
        state = self.optimizer.state[self.parameter]
        if kind not in state:
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
            state[kind] = torch.zeros_like(self.parameter)
        return _local(state[kind])

    def set_num_updates(self, num_updates: int) -> None:
        """Tell Adam how many updates there have been."""
        state = self.optimizer.state[self.parameter]
        if "step" in state:
            # Of its own, or one step would count once for every parameter that shares it.
            state["step"] = torch.full_like(state["step"], num_updates)
        for group in self.optimizer.param_groups:
            if "step" in group:  # apex and Transformer Engine
                group["step"] = num_updates

    def boxes(self, place: LocalParameter, values: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """`values [n]` of this run as boxes of HF tensors, each with its view."""
        for piece in place.run(self.start, self.start + len(values)):
            run = values[piece.start : piece.start + math.prod(piece.shape)]
            yield piece.box, run.view(piece.shape)[piece.region]


def wrap(chunks: Sequence[torch.nn.Module], layout: Layout) -> list[torch.nn.Module]:
    """Gradient buffers around the model's chunks, sharded as the stage says. Every rank must call."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=layout.sharding > 0,
        num_distributed_optimizer_instances=layout.data * layout.context // layout.num_shards,
    )
    if layout.sharding < 2:
        return [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
    fsdp.install()
    config.use_megatron_fsdp = True
    config.data_parallel_sharding_strategy = "optim_grads" if layout.sharding == 2 else "optim_grads_params"
    config.overlap_grad_reduce = True
    config.overlap_param_gather = layout.sharding == 3
    largest_layer = max(
        sum(parameter.numel() for parameter in layer.parameters()) for chunk in chunks for layer in chunk.decoder.layers
    )
    # Or ZeRO-2 would have all gradients whole at once, in one bucket.
    config.bucket_size = largest_layer
    # Gathered ahead at a time: the layer in use and the next; Megatron's own default is a billion elements at least.
    config.suggested_communication_unit_size = 2 * largest_layer
    wrapped = [fsdp.FullyShardedDataParallel(chunk.config, config, chunk) for chunk in chunks]
    # Replicas (HSDP) add up their gradients after the last micro-batch only if the schedule says which one it is.
    no_sync = [chunk.no_sync for chunk in wrapped]
    wrapped[0].config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


def make_optimizer(
    chunks: Sequence[torch.nn.Module],
    layout: Layout,
    dtype: torch.dtype,
    settings: OptimizerSettings,
    parallel: Parallel,
) -> MegatronOptimizer:
    """Adam over the wrapped chunks. Every rank must call.

    Without CUDA the states lie in host memory anyway, and offloading them means nothing.
    """
    offloads = parallel.optimizer_cpu_offload and backend.has_cuda()
    moments = {name: getattr(torch, getattr(parallel, f"{name}_dtype")) for name in MOMENTS}
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_epsilon,
            clip_grad=settings.max_grad_norm,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=layout.sharding > 0,
            optimizer_cpu_offload=offloads,
            optimizer_offload_fraction=parallel.optimizer_offload_fraction if offloads else 0.0,
            use_precision_aware_optimizer=parallel.use_precision_aware_optimizer,
            **{f"{name}_dtype": moment for name, moment in moments.items()},
        ),
        list(chunks),
        use_gloo_process_groups=False,
    )


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that one is made of: dense parameters', and experts' where these have ranks of their own."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def shards(
    optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module], names: Mapping[torch.nn.Parameter, str]
) -> list[Shard]:
    """Every run that this rank updates; runs without elements are left out."""
    found = []
    for part in parts(optimizer):
        if getattr(part, "optimizer", None) is None:
            continue
        if not isinstance(part, DistributedOptimizer):
            found += _whole(part, names)
        elif part.ddp_config.use_megatron_fsdp:
            found += _of_fsdp(part, chunks, names)
        else:
            found += _of_distributed(part, names)
    return sorted((shard for shard in found if len(shard.main)), key=lambda shard: shard.name)


def _whole(part: Any, names: Mapping[torch.nn.Parameter, str]) -> Iterator[Shard]:
    """ZeRO-0: each parameter, or its fp32 master."""
    masters = {}
    originals, copies = getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", [])
    for group, main_group in zip(originals, copies, strict=True):
        masters |= {id(main): parameter for parameter, main in zip(group, main_group, strict=True)}
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            yield Shard(names[masters.get(id(main), main)], 0, main.data.view(-1), main, part.optimizer)


def _of_distributed(part: DistributedOptimizer, names: Mapping[torch.nn.Parameter, str]) -> Iterator[Shard]:
    """ZeRO-1: runs of Megatron's flat buffers."""
    for parameter, (group, order) in part.model_param_group_index_map.items():
        run = part._get_model_param_range_map(parameter)["param"]
        main = part.optimizer.param_groups[group]["params"][order]
        yield Shard(names[parameter], run.start, main.data.view(-1), main, part.optimizer)


def _of_fsdp(
    part: DistributedOptimizer, chunks: Sequence[torch.nn.Module], names: Mapping[torch.nn.Parameter, str]
) -> Iterator[Shard]:
    """ZeRO-2 and 3: rows of each parameter, in DTensors."""
    for chunk in chunks:
        buffer = chunk.param_and_grad_buffer
        for _, main in buffer.optimizer_named_parameters:
            group = buffer.parameter_groups[buffer.param_to_param_group[main.orig_param]]
            grads = group.main_grad_buffer
            start, _ = grads.locate_item_in_global_item(grads.param_idx[main.orig_param])
            yield Shard(names[main.orig_param], start, _local(main.data), main, part.optimizer)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, of this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).reshape(-1)


def data_parallel_group(name: str, layout: Layout) -> dist.ProcessGroup:
    """The ranks among which the parameter `name` is sharded."""
    is_partial = layout.num_shards < layout.data * layout.context
    if "local_experts" in name and layout.expert > 1:
        return parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=is_partial)
    return parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=is_partial)
