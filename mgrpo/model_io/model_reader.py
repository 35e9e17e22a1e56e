"""Reads a model's weights from a folder of any format, and distinguishes them from other weights of the same shape."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from mgrpo.model_io.megatron_checkpoint import MegatronCheckpoint
from mgrpo.model_io.megatron_folder import is_megatron_folder, megatron_reader
from mgrpo.models.hf_files.weight_files import torch_dist_folder
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors
from mgrpo.policy.weights import Read, hf_reader


def model_reader(folder: str | Path, shape: ModelShape) -> Read:
    """Reads boxes of HF tensors from a Hugging Face folder, a Megatron folder or a checkpoint of Megatron-core.

    Raises:
        ValueError: those of the format's own reader.
    """
    if is_megatron_folder(folder):
        return megatron_reader(folder, shape)
    if torch_dist_folder(folder):
        return MegatronCheckpoint(folder, shape).read
    return hf_reader(folder, shape)


def fingerprint(read: Read, shape: ModelShape) -> str:
    """SHA-256 over the first row of every tensor, in the type in which it is stored: not all weights are read.

    Training changes every row of the matrices that it trains; folders of other formats or files have the same.
    """
    digest = hashlib.sha256()
    for name, full in hf_tensors(shape).items():
        row = read(Box(name, (0,) * len(full), (1, *full[1:]) if len(full) > 1 else full))
        digest.update(f"{name} {row.dtype}".encode())
        digest.update(row.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
