"""Reads slices of tensors from the safetensors files of a Hugging Face folder: no rank holds the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from mgrpo.models.family import ModelShape
from mgrpo.models.table import Box, hf_tensors


def tensor_files(model_dir: Path) -> dict[str, Path]:
    """The file of the checkpoint that holds each tensor."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: model_dir / file for name, file in weight_map.items()}
    single = model_dir / "model.safetensors"
    if not single.is_file():
        raise ValueError(
            f"{model_dir} has neither model.safetensors nor model.safetensors.index.json; "
            "only safetensors checkpoints are read (pickles are never loaded)"
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


Read = Callable[[Box], torch.Tensor]
"""Returns the values of one box of an HF tensor, wherever they are stored."""


def hf_reader(model_dir: str | Path, shape: ModelShape) -> Read:
    """A function that reads single boxes from the safetensors files of a Hugging Face folder.

    Raises:
        ValueError: tensors are missing, or (when read) have another shape than config.json implies.
    """
    model_dir = Path(model_dir)
    files = tensor_files(model_dir)
    expected = hf_tensors(shape)
    missing = sorted(expected.keys() - files.keys())
    if missing:
        raise ValueError(f"{model_dir} lacks {len(missing)} tensors, the first are {missing[:3]}")
    open_files: dict[Path, safe_open] = {}

    def read(box: Box) -> torch.Tensor:
        path = files[box.name]
        if path not in open_files:
            open_files[path] = safe_open(path, framework="pt")
        source = open_files[path].get_slice(box.name)
        if tuple(source.get_shape()) != expected[box.name]:
            raise ValueError(
                f"{path}: {box.name} has shape {source.get_shape()}, config.json implies {list(expected[box.name])}"
            )
        return source[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]

    return read
