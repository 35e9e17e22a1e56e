"""Megatron-FSDP, which shards gradients (ZeRO-2) and parameters (ZeRO-3), on layouts with pipeline stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

__all__ = ["REBOUND", "FullyShardedDataParallel", "install"]

REBOUND: tuple[tuple[str, str, str], ...] = (
    # (module under megatron.core, name, why; megatron-core 0.16.1)
    (
        "distributed.fsdp.mcore_fsdp_adapter",
        "_get_dp_tp_mesh",
        "builds its mesh over the world instead of this pipeline stage",
    ),
    ("distributed.fsdp.mcore_fsdp_adapter", "_get_hsdp_tp_mesh", "the same with replicas (HSDP)"),
)


def install() -> None:
    """Make Megatron-FSDP build its mesh from the groups that it is given. May be called again."""
    mcore_fsdp_adapter._get_dp_tp_mesh = lambda data, tensor, ep_size=1: _mesh(data, tensor)
    mcore_fsdp_adapter._get_hsdp_tp_mesh = _mesh


def _mesh(*groups: dist.ProcessGroup) -> torch.Tensor:
    """Ranks of a mesh whose axes through this rank are `groups`; along each axis ranks are evenly spaced."""
    mesh = torch.tensor(dist.get_rank())
    for group in groups:
        offsets = torch.tensor(dist.get_process_group_ranks(group)) - dist.get_rank()
        mesh = mesh[..., None] + offsets
    return mesh
