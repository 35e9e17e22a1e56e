"""Gather values whose number differs between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_values(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[n]` on each rank -> `[sum(n)]` on every rank, in rank order; n may be 0. Every rank of `group` must call."""
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=values.device)
    lengths[group.rank()] = len(values)
    dist.all_reduce(lengths, group=group)
    padded = values.new_zeros(group.size(), max(int(lengths.max()), 1))
    local = padded[group.rank()].clone()
    local[: len(values)] = values
    dist.all_gather(list(padded.unbind()), local, group=group)
    return torch.cat([row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)])
