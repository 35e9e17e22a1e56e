"""Who holds what of the model, as the ranks themselves say: ZeRO shards follow Megatron's buckets, not a formula."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from mgrpo.models.family import ModelShape
from mgrpo.models.table import Box, hf_tensors
from mgrpo.parallel.gather import gather_values

Held = tuple[int, Box]
"""A box and a number that says what of it is held."""


def everyones(held: Sequence[Held], shape: ModelShape, group: dist.ProcessGroup) -> list[list[Held]]:
    """What each rank holds, in its order. All ranks of `group`, on the CPU, must call."""
    names = list(hf_tensors(shape))
    number = {name: index for index, name in enumerate(names)}
    rows = np.full((len(held), 7), -1, dtype=np.int64)
    for row, (kind, box) in zip(rows, held, strict=True):
        row[:3] = group.rank(), kind, number[box.name]
        row[3 : 3 + len(box.start)] = box.start
        row[5 : 5 + len(box.shape)] = box.shape
    found: list[list[Held]] = [[] for _ in range(group.size())]
    for rank, kind, name, *places in gather_values(torch.from_numpy(rows).view(-1), group).view(-1, 7).tolist():
        start, extent = (tuple(n for n in part if n >= 0) for part in (places[:2], places[2:]))
        found[rank].append((kind, Box(names[name], start, extent)))
    return found
