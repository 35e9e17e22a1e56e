"""Gather values whose number differs between ranks."""

from __future__ import annotations

import json
from typing import Any

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


def gather_json(values: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's values, which JSON can carry, in rank order. Every rank of `group`, which is on CPU, must call."""
    line = json.dumps(values).encode() + b"\n"
    lines = gather_values(torch.frombuffer(bytearray(line), dtype=torch.uint8), group)
    return [json.loads(line) for line in lines.numpy().tobytes().splitlines()]
