"""What an engine's workers exchange before and after their experts; functions for `run_ranks`."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from mgrpo.sync.vllm_plugin import expert_exchange


def exchanged(sizes: list[int] | None, rows: list[int]) -> dict[str, object]:
    """A worker's tokens `[rows, 2]`, all 10 x rank + row, to all and back, with a router's choices beside them."""
    rank = dist.get_rank()
    communicator = SimpleNamespace(world_size=dist.get_world_size(), rank_in_group=rank, device_group=None)
    tokens = (10.0 * rank + torch.arange(rows[rank], dtype=torch.float32))[:, None].expand(-1, 2)
    choices = torch.full((rows[rank],), rank, dtype=torch.int64)
    gathered, chosen = expert_exchange.all_gatherv(communicator, [tokens, choices], 0, sizes)
    kept = gathered.clone()
    back = expert_exchange.reduce_scatterv(communicator, gathered * (rank + 1), 0, sizes)
    return {"gathered": kept[:, 0].tolist(), "chosen": chosen.tolist(), "back": back.tolist()}
