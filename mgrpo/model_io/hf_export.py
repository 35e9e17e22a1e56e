"""The trained model as a Hugging Face folder that transformers and vLLM load.

Tensors travel one by one from the ranks that hold them to rank 0, which writes a file of bounded size at a time: no rank
holds more than one file's worth beside its own weights.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mgrpo.models.table import Box, hf_tensors
from mgrpo.policy.policy import Policy

FILE_BYTES = 4 << 30
_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def export_hf(policy: Policy, source: str | Path, folder: str | Path, *, group: dist.ProcessGroup) -> None:
    """Write the policy's weights to `folder`, with configuration and tokenizer of `source`.

    Every learner rank must call. `group` is a gloo group of all learners. The folder appears complete or not at all.
    """
    rank, folder = dist.get_rank(), Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    held = dict(policy.boxes())
    owners = _owners(policy.holdings(group))
    files = _files(hf_tensors(policy.shape), policy.dtype.itemsize)
    weight_map = {}
    for number, names in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: _gather(name, shape, owners[name], held, policy.dtype, group) for name, shape in names.items()}
        if rank == 0:
            save_file(tensors, partial / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if rank == 0:
        if len(files) > 1:
            total = sum(policy.dtype.itemsize * Box("", (), shape).size for names in files for shape in names.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        for name in _COPIED:
            if (Path(source) / name).is_file():
                shutil.copy(Path(source) / name, partial / name)
        _set_dtype(partial / "config.json", policy.dtype)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    dist.barrier(group=group)


def _owners(boxes: list[list[Box]]) -> dict[str, dict[Box, int]]:
    """For each tensor its boxes, each with the lowest rank that holds it."""
    owners: dict[str, dict[Box, int]] = {}
    for rank, held in enumerate(boxes):
        for box in held:
            owners.setdefault(box.name, {}).setdefault(box, rank)
    return owners


def _files(tensors: dict[str, tuple[int, ...]], itemsize: int) -> list[dict[str, tuple[int, ...]]]:
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in tensors.items():
        size += itemsize * Box(name, (), shape).size
        if size > FILE_BYTES and files[-1]:
            files.append({})
            size = itemsize * Box(name, (), shape).size
        files[-1][name] = shape
    return files


def _gather(
    name: str,
    shape: tuple[int, ...],
    owners: dict[Box, int],
    held: dict[Box, torch.Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> torch.Tensor | None:
    """The whole tensor on rank 0, None elsewhere."""
    rank = dist.get_rank()
    whole = torch.empty(shape, dtype=dtype) if rank == 0 else None
    everything = Box(name, (0,) * len(shape), shape)
    for box, owner in owners.items():
        if rank == owner:
            part = held[box].to("cpu", dtype).contiguous()
            if rank != 0:
                dist.send(part, 0, group=group)
        if rank == 0:
            if owner != 0:
                part = torch.empty(box.shape, dtype=dtype)
                dist.recv(part, owner, group=group)
            whole[box.within(everything)] = part
    return whole


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text())
    name = str(dtype).removeprefix("torch.")
    config |= {key: name for key in ("torch_dtype", "dtype") if key in config}
    path.write_text(json.dumps(config, indent=2) + "\n")
