"""Reads a model's weights from a folder of any format."""

from __future__ import annotations

from pathlib import Path

from mgrpo.model_io.megatron_checkpoint import MegatronCheckpoint
from mgrpo.model_io.megatron_folder import is_megatron_folder, megatron_reader
from mgrpo.models.family import ModelShape
from mgrpo.models.weight_files import torch_dist_folder
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
