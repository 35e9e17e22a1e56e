"""Reads slices of tensors from the safetensors files of a Hugging Face folder: no rank holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from mgrpo.models.hf_files.weight_files import tensor_files, weight_problems
from mgrpo.models.placement.boxes import Box, LocalParameter
from mgrpo.models.shape import ModelShape

Read = Callable[[Box], torch.Tensor]
"""Returns the values of one box of an HF tensor, wherever they are stored."""


def parameter_rows(parameter: LocalParameter, rows: Box, dtype: torch.dtype, read: Read) -> torch.Tensor:
    """Whole rows of a parameter, assembled from HF tensors of the same type; elements that no piece covers are 0."""
    values = torch.zeros(rows.shape, dtype=dtype)
    for piece in parameter.pieces:
        common = rows.intersect(piece.place)
        if common is not None:
            part = read(piece.part(common))
            assert part.dtype == dtype, (piece.box, part.dtype, dtype)
            values[common.within(rows)].view_as(part).copy_(part)
    return values


def hf_reader(model_dir: str | Path, shape: ModelShape) -> Read:
    """A function that reads single boxes from the safetensors files of a Hugging Face folder.

    Raises:
        ValueError: tensors are missing, incomplete, or of another shape than config.json implies.
    """
    if problems := list(weight_problems(model_dir, shape)):
        raise ValueError("; ".join(problems))
    files = tensor_files(model_dir)
    open_files: dict[Path, safe_open] = {}

    def read(box: Box) -> torch.Tensor:
        path = files[box.name]
        if path not in open_files:
            open_files[path] = safe_open(path, framework="pt")
        region = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        return open_files[path].get_slice(box.name)[region]

    return read
