"""Values of different lengths from every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_values(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' `[n]` of one dtype, in rank order; n differs and may be 0. Every rank of `group` must call."""
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=values.device)
    lengths[group.rank()] = len(values)
    dist.all_reduce(lengths, group=group)
    padded = values.new_zeros(group.size(), max(int(lengths.max()), 1))
    own = padded[group.rank()].clone()
    own[: len(values)] = values
    dist.all_gather(list(padded.unbind()), own, group=group)
    return torch.cat([row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)])
