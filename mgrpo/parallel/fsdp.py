"""Megatron-FSDP, which shards gradients (ZeRO-2) and parameters (ZeRO-3), on layouts with pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP, param_and_grad_buffer

__all__ = ["REBOUND", "FullyShardedDataParallel", "install"]

REBOUND: tuple[tuple[str, str, str], ...] = (
    # (module under megatron.core, name, why; megatron-core 0.16.1)
    (
        "distributed.fsdp.mcore_fsdp_adapter",
        "_get_dp_tp_mesh",
        "builds its mesh over the world instead of this pipeline stage",
    ),
    ("distributed.fsdp.mcore_fsdp_adapter", "_get_hsdp_tp_mesh", "the same with replicas (HSDP)"),
    (
        "distributed.fsdp.mcore_fsdp_adapter",
        "MegatronFSDP",
        "passes over the hooks of the whole chunk, and learns of its backward pass from the chunk's last submodule",
    ),
    (
        "distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
        "build_data_parallel_buffer_index",
        "cuts tensors that are small beside others between two ranks in the middle of a row",
    ),
)


def install() -> None:
    """Make Megatron-FSDP build its mesh from the groups that it is given, and run under recomputation. May be called again."""
    mcore_fsdp_adapter.MegatronFSDP = _HookedFSDP
    mcore_fsdp_adapter._get_dp_tp_mesh = lambda data, tensor, ep_size=1: _mesh(data, tensor)
    mcore_fsdp_adapter._get_hsdp_tp_mesh = _mesh
    param_and_grad_buffer.build_data_parallel_buffer_index = index_of_whole_rows


class _HookedFSDP(MegatronFSDP):
    """Megatron-FSDP that calls the chunk as a module, so that the hooks of the whole chunk run.

    One of them, on the chunk's output, begins the backward pass and reduces the remaining gradients at its end.
    Without it the chunk's last submodule does that. Before the last stage this one is in a layer: if the layer is
    recomputed, its backward pass is nested in that of the chunk and ends before the other gradients exist.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        self._replace_param_with_raw_if_needed()
        return self.module(*inputs, **kwargs)


_index = param_and_grad_buffer.build_data_parallel_buffer_index


def index_of_whole_rows(
    elements: Sequence[torch.Size],
    data_parallel_rank: int,
    data_parallel_world_size: int,
    is_data_distributed: bool,
    ddp_config: Any,
    bucket_id: int = 0,
    chunk_size_factor: int = 1,
) -> tuple[Any, Any, Any]:
    """Megatron's places of a bucket's tensors, in which every rank has whole rows of each; see there.

    Ranks begin at multiples of `chunk_size_factor`, a common multiple of the lengths of rows. Megatron fills up the bucket's end
    with tensors shorter than that, one behind the other; here one that would be cut within a row goes to the next multiple.
    """
    ranks, unit = data_parallel_world_size, chunk_size_factor
    places, bucket, shard = _index(
        elements, data_parallel_rank, ranks, is_data_distributed, ddp_config, bucket_id, chunk_size_factor
    )
    moved, end = 0, 0
    for place in sorted(places.values(), key=lambda place: place.global_data_index):
        start = place.global_data_index + moved
        whole = -start % unit
        if whole < place.size and whole % place.shape[1:].numel():
            moved, start = moved + whole, start + whole
        places[place.item_id] = place._replace(global_data_index=start)
        end = start + place.size
    if moved:
        size = -(-end // (ranks * unit)) * ranks * unit
        bucket = bucket._replace(size=size, items=list(places.values()))
        shard = param_and_grad_buffer._get_dp_buffer_shard_bucket_index(
            bucket, is_data_distributed, ranks, data_parallel_rank
        )
    return places, bucket, shard


def _mesh(*groups: dist.ProcessGroup) -> torch.Tensor:
    """Ranks of a mesh whose axes through this rank are `groups`; along each axis ranks are evenly spaced."""
    mesh = torch.tensor(dist.get_rank())
    for group in groups:
        offsets = torch.tensor(dist.get_process_group_ranks(group)) - dist.get_rank()
        mesh = mesh[..., None] + offsets
    return mesh
