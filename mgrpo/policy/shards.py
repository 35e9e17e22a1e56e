"""The shards of this rank's optimizer: for each parameter the run of elements it updates, whatever the ZeRO stage.

Megatron keeps these runs in a different place for each of its optimizers; the rest of the package uses only `Shard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.tensor import DTensor

from mgrpo.layout import Layout
from mgrpo.models.placement.boxes import Box, LocalParameter
from mgrpo.parallel.fsdp import FullyShardedDataParallel

MOMENTS = ("exp_avg", "exp_avg_sq")
Names = Mapping[torch.nn.Parameter, str]
"""The name of each live parameter in the rule table."""


class HasTorchOptimizer(Protocol):
    """A Megatron optimizer around one of torch; in half precision it also has groups of parameters and of masters."""

    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements `start : start + len(main)` of a parameter, counted row by row."""

    name: str
    """The parameter's name in the rule table."""
    start: int
    main: torch.Tensor
    """`[n]` float32, the values that the optimizer updates."""
    parameter: torch.Tensor
    """The optimizer's own parameter, which gradient and state belong to."""
    optimizer: torch.optim.Optimizer

    @property
    def gradient(self) -> torch.Tensor:
        """`[n]` float32, summed over all axes, between the backward pass and the next step."""
        assert self.parameter.grad is not None, f"{self.name} has no gradient"
        return local_part(self.parameter.grad)

    def moment(self, kind: str) -> torch.Tensor:
        """`[n]`: Adam's "exp_avg" or "exp_avg_sq"; created as zeros when there has been no step yet."""
        state = self.optimizer.state[self.parameter]
        if kind not in state:
            if self._counts_each:
                # torch's fused Adam counts on its parameter's device.
                is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
                device = self.parameter.device if is_fused else "cpu"
                state.setdefault("step", torch.zeros((), dtype=torch.float32, device=device))
            state[kind] = torch.zeros_like(self.parameter)
        return local_part(state[kind])

    def set_num_updates(self, num_updates: int) -> None:
        """Set Adam's count of updates, after `moment` has made its states."""
        if self._counts_each:
            state = self.optimizer.state[self.parameter]
            # A tensor for each parameter: a shared one would count a step once per parameter.
            state["step"] = torch.full_like(state["step"], num_updates)
        else:
            for group in self.optimizer.param_groups:
                group["step"] = num_updates

    @property
    def _counts_each(self) -> bool:
        """torch's Adam counts the updates of each parameter, those of Transformer Engine and apex of each group."""
        return isinstance(self.optimizer, torch.optim.Adam)

    def boxes(self, parameter: LocalParameter, values: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """`values [n]` of this run as boxes of HF tensors, each with its view; `parameter` is the table's entry."""
        for piece in parameter.run(self.start, self.start + len(values)):
            rows = values[piece.start : piece.start + math.prod(piece.shape)]
            yield piece.box, rows.view(piece.shape)[piece.region].view(piece.box.shape)


def chained(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that this one consists of: for dense parameters, and for experts with separate data-parallel ranks."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def local_shards(optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module], names: Names) -> list[Shard]:
    """Every run that this rank updates, by name; runs without elements are left out."""
    shards: list[Shard] = []
    for single in chained(optimizer):
        if getattr(single, "optimizer", None) is None:
            continue
        if not isinstance(single, DistributedOptimizer):
            shards += _unsharded(single, names)
        elif single.ddp_config.use_megatron_fsdp:
            shards += _of_fsdp(single, chunks, names)
        else:
            shards += _of_distributed(single, names)
    return sorted((shard for shard in shards if len(shard.main)), key=lambda shard: shard.name)


def _unsharded(single: HasTorchOptimizer, names: Names) -> Iterator[Shard]:
    """ZeRO-0: each parameter, or its fp32 master."""
    parameter_of_master: dict[int, torch.nn.Parameter] = {}
    groups, master_groups = getattr(single, "float16_groups", []), getattr(single, "fp32_from_float16_groups", [])
    for group, master_group in zip(groups, master_groups, strict=True):
        parameter_of_master |= {id(master): parameter for parameter, master in zip(group, master_group, strict=True)}
    for param_group in single.optimizer.param_groups:
        for main in param_group["params"]:
            name = names[parameter_of_master.get(id(main), main)]
            yield Shard(name, 0, main.data.view(-1), main, single.optimizer)


def _of_distributed(single: DistributedOptimizer, names: Names) -> Iterator[Shard]:
    """ZeRO-1: runs of Megatron's flat buffers."""
    for parameter, (group, index) in single.model_param_group_index_map.items():
        run = single._get_model_param_range_map(parameter)["param"]
        main = single.optimizer.param_groups[group]["params"][index]
        yield Shard(names[parameter], run.start, main.data.view(-1), main, single.optimizer)


def _of_fsdp(single: DistributedOptimizer, chunks: Sequence[FullyShardedDataParallel], names: Names) -> Iterator[Shard]:
    """ZeRO-2 and 3: rows of each parameter, in DTensors."""
    for chunk in chunks:
        buffer = chunk.param_and_grad_buffer
        for _, main in buffer.optimizer_named_parameters:
            group = buffer.parameter_groups[buffer.param_to_param_group[main.orig_param]]
            gradients = group.main_grad_buffer
            start, _ = gradients.locate_item_in_global_item(gradients.param_idx[main.orig_param])
            yield Shard(names[main.orig_param], start, local_part(main.data), main, single.optimizer)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements, flat."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).reshape(-1)


def data_parallel_group(name: str, layout: Layout) -> dist.ProcessGroup:
    """The ranks among which the parameter `name` is sharded."""
    is_partial = layout.num_shards < layout.data * layout.context
    if ".experts." in name and layout.expert > 1:
        return parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=is_partial)
    return parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=is_partial)
