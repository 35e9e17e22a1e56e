"""The trained model as a Hugging Face folder that transformers and vLLM load.

Tensors travel one by one from the ranks that hold them to rank 0, which writes each before it asks for the next: no rank
holds more than one tensor beside its own weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from mgrpo.checkpoint.space import OutputError, no_room, with_room
from mgrpo.model_io.hf_folder import Header, carry, header_bytes, write_weights
from mgrpo.models.table import Box, Shape, hf_tensors
from mgrpo.parallel.gather import gather_json
from mgrpo.policy.policy import Policy


def export_hf(
    policy: Policy,
    source: str | Path,
    folder: str | Path,
    *,
    group: dist.ProcessGroup,
    add: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Write the policy's weights to `folder`, with configuration and tokenizer of `source`.

    Every learner rank must call. `group` is a gloo group of all learners. The folder appears complete or not at all.

    Args:
        add: on rank 0, writes more files to the folder that it is given.
    Raises:
        OutputError: on all ranks, when the folder could not be written.
    """
    folder = Path(folder)
    shapes = hf_tensors(policy.shape)
    held, owners = dict(policy.boxes()), _owners(policy.holdings(group))
    problem, cause = None, None
    if dist.get_rank() == 0:
        pending = iter(shapes)

        def values(name: str) -> list[torch.Tensor]:
            # All tensors are of one type, so that they are written in the order of `shapes`, in which the others send.
            assert next(pending) == name
            return [_gather(name, shapes[name], owners[name], held, policy.dtype, group)]

        try:
            _write(folder, Path(source), {name: (policy.dtype, shape) for name, shape in shapes.items()}, values, add)
        except Exception as err:
            problem, cause = f"the model could not be exported to {folder}: {err}", err
        for name in pending:  # after an error: the others send everything
            _gather(name, shapes[name], owners[name], held, policy.dtype, group)
    else:
        for name in shapes:
            _send(owners[name], held, policy.dtype, group)
    problem = gather_json(problem, group)[0]
    if problem:
        raise OutputError(problem) from cause


def export_bytes(policy: Policy) -> int:
    """Size of the weights that `export_hf` writes."""
    return sum(header_bytes((policy.dtype, shape)) for shape in hf_tensors(policy.shape).values())


def _write(
    folder: Path,
    source: Path,
    tensors: Mapping[str, Header],
    values: Callable[[str], list[torch.Tensor]],
    add: Callable[[Path], object],
) -> None:
    num_bytes = sum(map(header_bytes, tensors.values()))
    if problem := no_room(folder, num_bytes):
        raise OSError(problem)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        carry(source, partial, dtype=tensors[next(iter(tensors))][0])
        write_weights(tensors, values, partial)
        add(partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except Exception as err:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(with_room(err, folder, num_bytes)) from err


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
