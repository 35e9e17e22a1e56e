"""A policy that gives up its device memory between steps and takes it again."""

from __future__ import annotations

import pytest

from tests.ranks import optimizer_cases
from tests.tiny_models import save_tiny
from tools import parity

pytestmark = pytest.mark.learners


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen2", "dp2+zero0"),
        ("qwen2", "dp2"),
        ("qwen2", "dp2+zero2"),
        ("qwen2", "dp2+zero3"),
        ("llama, tied", "pp2xdp2+zero3"),
        ("qwen3-moe", "ep2"),
        ("qwen2", "dp2+lora"),
        ("qwen3-moe", "ep2+lora+zero0"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_that_was_offloaded_learns_the_same(run_ranks, tmp_path, model, layout, dtype):
    """A master, a moment or a count of steps that is not restored to the bit trains another model, and nothing says so."""
    case = parity.parse(layout)
    folder = str(save_tiny(tmp_path, **parity.MODELS[model]))
    arguments = {"model_dir": folder, "layout": case.layout, "samples": parity.SAMPLES, "steps": 3, "dtype": dtype}
    arguments |= case.options
    run = optimizer_cases.offloaded
    truth = run_ranks(case.ranks, run, in_parts=None, **arguments)
    for in_parts in (True, False):
        for own, expected in zip(run_ranks(case.ranks, run, in_parts=in_parts, **arguments), truth, strict=True):
            for name in ("losses", "grad_norms", "held"):
                assert own[name] == expected[name], name
            assert own["left"] == [{"parameters": 0, "gradients": 0, "optimizer": 0}] * 5
