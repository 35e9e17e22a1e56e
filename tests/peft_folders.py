"""Folders of adapters as peft writes them, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from mgrpo.models.adapters import LoraShape, adapter_tensors
from mgrpo.models.peft import CONFIG, PREFIX, WEIGHTS, peft_config
from mgrpo.models.shape import ModelShape


def save_adapter(folder: Path, model: ModelShape, lora: LoraShape, **changed: object) -> Path:
    """Random adapters of `lora`; `changed` are fields of adapter_config.json."""
    torch.manual_seed(3)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + name: 0.1 * torch.randn(shape) for name, shape in adapter_tensors(model, lora).items()}
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(peft_config(model, lora, base="base") | changed))
    return folder
