"""What adapters must compute, from transformers alone: at W' = W + scale B A the plain gradient G of W' gives
dA = scale B^T G and dB = scale G A^T."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mgrpo.models.adapters import LoraShape, lora_a, lora_b
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from tests.ranks import cases
from tests.ranks.test_layouts import oracle

LORA = {"rank": 3, "alpha": 6}
"""3 divides nothing: no axis may need a share of the rank."""


def lora_oracle(model_dir: Path, samples: list[Any], loss: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Loss, logprobs with and without adapters, their gradients and the merged weights, whole.

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
        plain = torch.from_numpy(truth["gradients"][name])
        gradients[lora_a(name)] = (lora.scale * b.T @ plain).numpy()
        gradients[lora_b(name)] = (lora.scale * plain @ a.T).numpy()
    return truth | {
        "gradients": gradients,
        "without_adapters": {n: own[0] for n, own in oracle(model_dir, samples, loss)["samples"].items()},
        "merged": {name: weight.numpy() for name, weight in merged.items()},
    }


def differences(ranks: list[dict[str, Any]], truth: dict[str, Any]) -> dict[str, float]:
    """The largest of gradients (relative to the largest element of their tensor), logprobs with and without adapters,
    merged weights, and of the gradient norm (relative)."""
    gradients = truth["gradients"]
    norm = np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients.values()))
    worst = {"gradient": 0.0, "logprob": 0.0, "reference": 0.0, "merged": 0.0}
    seen = {name: np.zeros(gradient.shape, dtype=bool) for name, gradient in gradients.items()}
    samples = set()
    for rank in ranks:
        for box, gradient in rank["gradients"]:
            place, expected = cases.region(box), gradients[box.name]
            error = float(np.abs(gradient - expected[place]).max() / np.abs(expected).max())
            worst["gradient"] = max(worst["gradient"], error)
            seen[box.name][place] = True
        for box, weight in rank["merged"]:
            expected = truth["merged"].get(box.name)
            if expected is not None:
                worst["merged"] = max(worst["merged"], float(np.abs(weight - expected[cases.region(box)]).max()))
        if rank["reports_metrics"]:
            for number, (logprobs, _) in rank["samples"].items():
                own, reference = truth["samples"][number][0], truth["without_adapters"][number]
                worst["logprob"] = max(worst["logprob"], float(np.abs(np.array(logprobs) - own).max()))
                error = float(np.abs(np.array(rank["without_adapters"][number]) - reference).max())
                worst["reference"] = max(worst["reference"], error)
                samples.add(number)
    assert samples == truth["samples"].keys(), "some sample was not trained"
    assert all(whole.all() for whole in seen.values()), "no rank has some gradient"
    return worst | {"norm": max(abs(rank["grad_norm"] / norm - 1) for rank in ranks)}
