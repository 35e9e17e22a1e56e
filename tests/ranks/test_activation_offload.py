"""Activations that wait in host memory give the same gradients, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks import activation_cases
from tests.tiny_models import save_tiny
from tools import parity

pytestmark = pytest.mark.learners

MODELS = parity.MODELS | {"qwen3-moe, 12 layers": {"family": "qwen3_moe", "layers": 12}}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen2", "dp1"),
        ("qwen3-moe", "dp1+selective"),
        ("deepseek-v3", "dp1+full"),
        ("qwen3-next", "dp1"),
        ("qwen2", "dp1+lora"),
        ("qwen3 (QK norm)", "tp2+sp"),
        ("qwen2", "tp2+sp+full"),
        ("llama, tied", "pp2"),
        ("qwen3-moe, 12 layers", "pp2xvpp2+full"),
        ("qwen2", "cp2+full"),
        ("qwen3-moe", "ep2+full"),
        ("gpt-oss", "ep2"),
        ("qwen2", "dp2+zero2"),
        ("qwen2", "dp2+zero3"),
    ],
)
def test_offloaded_activations_give_the_same_gradients(run_ranks, tmp_path, model, layout):
    """A tensor that comes back as another one, or as what later overwrote it, trains another model, and nothing says so.

    Their memory is free before the first of them comes back.
    """
    folder, found = str(save_tiny(tmp_path, **MODELS[model])), []
    for name in (layout, f"{layout}+offloaded"):
        case = parity.parse(name)
        arguments = {"model_dir": folder, "layout": case.layout, "samples": parity.SAMPLES, "loss": parity.LOSS}
        found.append(run_ranks(case.ranks, activation_cases.gradients, **arguments | case.options))
    for truth, own in zip(*found, strict=True):
        assert truth["offloaded"] == {"sent": 0, "gone": 0}
        assert own["offloaded"]["sent"] > 0
        assert own["offloaded"]["gone"] > 0.9 * own["offloaded"]["sent"]
        for name in ("loss", "samples", "grad_norm"):
            assert own[name] == truth[name], name
        for (box, gradient), (expected_box, expected) in zip(own["gradients"], truth["gradients"], strict=True):
            assert box == expected_box
            np.testing.assert_array_equal(gradient, expected, err_msg=box.name)
