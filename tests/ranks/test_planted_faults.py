"""Small faults of a model, each of which the comparison with transformers reports, with a tensor that it changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ranks import cases
from tests.ranks.outcomes import LIMITS, Outcome, collect, compare, gradient_differences
from tests.ranks.test_families import SAMPLES
from tests.ranks.test_layouts import LOSS, oracle
from tests.tiny_models import save_tiny


def outcome(run_ranks, folder, truth, function=cases.gradients, **fault):
    arguments = {"model_dir": str(folder), "layout": {}, "samples": SAMPLES, "loss": LOSS, "pack_length": 192}
    ranks = run_ranks(1, function, **arguments, **fault)
    return collect(ranks, {name: gradient.shape for name, gradient in truth.gradients.items()})


def changed(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a model with other weights."""
    shutil.copytree(folder, target)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("fault", "family", "tensor"),
    [
        ("other_latent_epsilon", "deepseek_v3", "model.layers."),
        ("other_latent_epsilon", "glm4_moe_lite", "model.layers."),
        ("larger_sinks", "gpt_oss", "self_attn.sinks"),
        ("late_branch", "llama", "self_attn."),
        ("undecayed_states", "qwen3_5_text", "linear_attn."),
        ("undecayed_states", "qwen3_next", "linear_attn."),
    ],
)
def test_a_fault_of_the_code_is_reported(run_ranks, tmp_path, fault, family, tensor):
    """Of the sizes that matter least: sinks are 1.0003 times as large, half of one branch is one position late."""
    folder = save_tiny(tmp_path, family, layers=2)
    truth = oracle(folder, SAMPLES, LOSS)
    found = compare(outcome(run_ranks, folder, truth, cases.sabotaged_gradients, sabotage=fault), truth)
    assert not found.is_equal and tensor in found.tensor, found


def test_a_fault_of_an_expert_with_small_gradients_is_reported(run_ranks, tmp_path):
    """All experts of a gpt-oss layer are one tensor: of each token this one has a 20,000th, and another one has the rest."""

    def favour_the_first(weights):
        for layer in range(2):
            weights[f"model.layers.{layer}.mlp.router.bias"].copy_(torch.tensor([10.0, -10, -10, 0]))

    def enlarge(weights):
        weights["model.layers.1.mlp.experts.down_proj"][3] *= 1.01

    right = changed(save_tiny(tmp_path, "gpt_oss", layers=2), tmp_path / "right", favour_the_first)
    wrong = changed(right, tmp_path / "wrong", enlarge)
    truth = oracle(right, SAMPLES, LOSS)
    experts = {name: gradient for name, gradient in truth.gradients.items() if ".experts." in name}
    first, *_, last = abs(experts["model.layers.1.mlp.experts.gate_up_proj"]).max((1, 2))
    assert 0 < last < 2e-4 * first
    of_tensors, of_rows, _ = gradient_differences(outcome(run_ranks, right, truth).gradients, experts)
    assert of_tensors <= LIMITS["gradient"] and of_rows <= LIMITS["row"]
    of_tensors, of_rows, tensor = gradient_differences(outcome(run_ranks, wrong, truth).gradients, experts)
    assert of_tensors <= LIMITS["gradient"] and of_rows == pytest.approx(0.01, rel=0.1)
    assert tensor.startswith("model.layers.1.mlp.experts.gate_up_proj")


def test_a_wrong_gradient_of_the_rarest_token_is_reported(tmp_path):
    """The row of the embedding with the smallest gradient, 1 percent too large."""
    truth = oracle(save_tiny(tmp_path, "llama", layers=2), SAMPLES, LOSS)
    wrong = truth.gradients["model.embed_tokens.weight"].copy()
    rows = abs(wrong).max(1)
    smallest = rows[rows > 0].min()
    assert smallest < 1e-2 * rows.max()
    wrong[rows == smallest] *= 1.01
    found = compare(replace(truth, gradients=truth.gradients | {"model.embed_tokens.weight": wrong}), truth)
    assert found.tensor == "model.embed_tokens.weight" and found.row > LIMITS["row"], found


@pytest.mark.parametrize("field", ["logprobs", "entropies", "gradients", "grad_norms", "loss"])
def test_a_value_that_is_not_a_number_is_reported(field):
    """NaN is larger than nothing: a maximum of Python's floats passes over it."""
    right = Outcome(1.0, {0: np.ones(2), 1: np.ones(2)}, {0: np.ones(2)}, {"a": np.ones((2, 2))}, [1.0, 1.0])
    nan = {0: np.ones(2), 1: np.array([1, np.nan])}
    wrong: dict[str, Any] = {
        "logprobs": nan,
        "entropies": {0: nan[1]},
        "gradients": {"a": np.array([[1, 1], [1, np.nan]])},
        "grad_norms": [1.0, np.nan],
        "loss": np.nan,
    }
    assert compare(right, right).is_equal
    assert not compare(replace(right, **{field: wrong[field]}), right).is_equal
