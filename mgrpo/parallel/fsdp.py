"""Megatron-FSDP, which shards gradients (ZeRO-2) and parameters (ZeRO-3), on layouts with pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP

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
)


def install() -> None:
    """Make Megatron-FSDP build its mesh from the groups that it is given, and run under recomputation. May be called again."""
    mcore_fsdp_adapter.MegatronFSDP = _HookedFSDP
    mcore_fsdp_adapter._get_dp_tp_mesh = lambda data, tensor, ep_size=1: _mesh(data, tensor)
    mcore_fsdp_adapter._get_hsdp_tp_mesh = _mesh


class _HookedFSDP(MegatronFSDP):
    """Megatron-FSDP that calls the chunk as a module, so that the hooks of the whole chunk run.

    One of them, on the chunk's output, begins the backward pass and reduces what is left of the gradients at its end.
    Without it the chunk's last submodule does that. Before the last stage this one lies in a layer: if the layer is
    recomputed, its backward pass is nested in that of the chunk and ends before the other gradients exist.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        self._replace_param_with_raw_if_needed()
        return self.module(*inputs, **kwargs)


def _mesh(*groups: dist.ProcessGroup) -> torch.Tensor:
    """Ranks of a mesh whose axes through this rank are `groups`; along each axis ranks are evenly spaced."""
    mesh = torch.tensor(dist.get_rank())
    for group in groups:
        offsets = torch.tensor(dist.get_process_group_ranks(group)) - dist.get_rank()
        mesh = mesh[..., None] + offsets
    return mesh
