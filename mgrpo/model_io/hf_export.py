"""The trained model as a Hugging Face folder that transformers and vLLM load.

Tensors travel one by one from the ranks that hold them to rank 0, which writes each before it asks for the next: no rank
holds more than one tensor beside its own weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from mgrpo.model_io.hf_folder import carry, write_weights
from mgrpo.models.table import Box, Shape, hf_tensors
from mgrpo.policy.policy import Policy


def export_hf(policy: Policy, source: str | Path, folder: str | Path, *, group: dist.ProcessGroup) -> None:
    """Write the policy's weights to `folder`, with configuration and tokenizer of `source`.

    Every learner rank must call. `group` is a gloo group of all learners. The folder appears complete or not at all.
    """
    folder = Path(folder)
    shapes = hf_tensors(policy.shape)
    held, owners = dict(policy.boxes()), _owners(policy.holdings(group))
    if dist.get_rank() == 0:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        carry(Path(source), partial, dtype=policy.dtype)
        # All tensors are of one type, so that they are written in the order of `shapes`, in which the others send them.
        write_weights(
            {name: (policy.dtype, shape) for name, shape in shapes.items()},
            lambda name: [_gather(name, shapes[name], owners[name], held, policy.dtype, group)],
            partial,
        )
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    else:
        for name in shapes:
            _send(owners[name], held, policy.dtype, group)
    dist.barrier(group=group)


def _owners(boxes: list[list[Box]]) -> dict[str, dict[Box, int]]:
    """For each tensor its boxes, each with the lowest rank that holds it."""
    owners: dict[str, dict[Box, int]] = {}
    for rank, held in enumerate(boxes):
        for box in held:
            owners.setdefault(box.name, {}).setdefault(box, rank)
    return owners


def _gather(
    name: str,
    shape: Shape,
    owners: Mapping[Box, int],
    held: Mapping[Box, torch.Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Rank 0: the whole tensor."""
    whole, everything = torch.empty(shape, dtype=dtype), Box(name, (0,) * len(shape), shape)
    for box, owner in owners.items():
        if owner == 0:
            part = held[box].to("cpu", dtype)
        else:
            part = torch.empty(box.shape, dtype=dtype)
            dist.recv(part, owner, group=group)
        whole[box.within(everything)] = part
    return whole


def _send(
    owners: Mapping[Box, int], held: Mapping[Box, torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    """The other ranks: what this one owns of a tensor."""
    for box, owner in owners.items():
        if owner == dist.get_rank():
            dist.send(held[box].to("cpu", dtype).contiguous(), 0, group=group)
