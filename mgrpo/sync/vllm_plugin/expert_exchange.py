"""Exchange of tokens with the experts of other workers in an engine on a CPU with data-parallel attention.

vLLM gathers the tokens of all workers, applies each worker's experts to them, and scatters the sums back. Its communicator for CPUs
has neither operation for parts of different sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator"


def all_gatherv(self: Any, tensors: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """Concatenate the members' rows.

    Args:
        tensors: `[own rows, ...]`, or a list of such.
        sizes: rows of each member; None: equal.

    Returns:
        `[sum(sizes), ...]`, or a list of such. Collective over the communicator's group.
    """
    assert dim == 0, dim
    if not isinstance(tensors, torch.Tensor):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in tensors]
    sizes = [len(tensors)] * self.world_size if sizes is None else sizes
    padded = tensors.new_zeros(max(sizes), *tensors.shape[1:])
    padded[: len(tensors)] = tensors
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])


def reduce_scatterv(self: Any, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This member's rows of the sum over all members.

    Args:
        tensor: `[sum(sizes), ...]`, unchanged.
        sizes: rows of each member; None: equal.

    Returns:
        `[own rows, ...]`. Collective over the communicator's group.
    """
    assert dim in (0, -tensor.dim()), dim
    sizes = [len(tensor) // self.world_size] * self.world_size if sizes is None else sizes
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=self.device_group)
    return total.split(list(sizes))[self.rank_in_group].clone()
