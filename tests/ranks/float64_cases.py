"""The policy in float64, for comparisons in which float32's rounding would hide a token that is trained twice.

Kernels of the head know float32 and shorter types alone: their oracle takes their place, on all shards of the vocabulary.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mgrpo import ops
from mgrpo.ops import reference
from tests.ranks import cases


def gradients(**arguments: Any) -> dict[str, Any]:
    """As `cases.gradients`."""
    from mgrpo.policy import optimizer

    buffers = mock.patch.object(optimizer, "DistributedDataParallelConfig", _unrounded)
    with mock.patch.object(ops, "token_logprobs", _token_logprobs), buffers:
        return cases.gradients(dtype="float64", **arguments)


def _unrounded(**settings: Any) -> Any:
    """Gradients are kept and summed in the weights' type."""
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(**settings | {"grad_reduce_in_fp32": False})


def _token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    valid_cols: int,
    group: dist.ProcessGroup,
    with_entropy: bool,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shards = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(shards, logits.detach().contiguous(), group=group)
    # The gradient is that of the own shard, as the op's is.
    shards[group.rank()] = logits
    whole = torch.cat(shards, 1)[:, : _valid(valid_cols, group)]
    logprobs, entropy = reference.token_logprobs(whole, targets, temperature=temperature)
    return logprobs, entropy if with_entropy else None


def _valid(own: int, group: dist.ProcessGroup) -> int:
    """Columns of all shards; padding is at the end."""
    total = torch.tensor(own)
    dist.all_reduce(total, group=group)
    return int(total)
