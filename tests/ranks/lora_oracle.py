"""What adapters must compute, from transformers alone: at W' = W + scale B A the plain gradient G of W' gives
dA = scale B^T G and dB = scale G A^T."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mgrpo.models.adapters import LoraShape, lora_a, lora_b
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from tests.ranks import cases
from tests.ranks.outcomes import Outcome, global_norm
from tests.ranks.test_layouts import oracle

LORA = {"rank": 3, "alpha": 6}
"""3 divides nothing: no axis may need a share of the rank."""


def lora_oracle(
    model_dir: Path, samples: list[Any], loss: dict[str, Any], folder: Path
) -> tuple[Outcome, dict[str, np.ndarray]]:
    """The outcome, with gradients of adapters and logprobs also without them, and the merged weights, whole.

    Args:
        folder: where the merged model is written.
    """
    lora = LoraShape(**LORA)
    adapters = cases.random_adapters(shape_of(read_hf_config(model_dir)), lora)
    weights = load_file(model_dir / "model.safetensors")
    pairs = {
        name: (torch.from_numpy(adapters[lora_a(name)]), torch.from_numpy(adapters[lora_b(name)]))
        for name in weights
        if lora.adapts(name)
    }
    merged = weights | {name: weights[name] + lora.scale * b @ a for name, (a, b) in pairs.items()}
    shutil.copytree(model_dir, folder)
    save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
    truth = oracle(folder, samples, loss)
    gradients = {}
    for name, (a, b) in pairs.items():
        plain = torch.from_numpy(truth.gradients[name])
        gradients[lora_a(name)] = (lora.scale * b.T.double() @ plain).numpy()
        gradients[lora_b(name)] = (lora.scale * plain @ a.T.double()).numpy()
    without = {(n, "without"): logprobs for n, logprobs in oracle(model_dir, samples, loss).logprobs.items()}
    truth = replace(truth, logprobs=truth.logprobs | without, gradients=gradients, grad_norms=[global_norm(gradients)])
    return truth, {name: weight.numpy() for name, weight in merged.items()}
