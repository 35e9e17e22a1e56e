"""Training in float16: the same in every layout, near to float32, and one loss scale that all ranks follow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.table import trained_tensors
from tests.ranks import cases, float16_cases
from tests.ranks.outcomes import collect, compare
from tests.ranks.test_layouts import UNCLIPPED
from tests.ranks.test_learning import SETTINGS, scored_groups
from tests.tiny_models import load_hf, save_tiny
from tools import parity

pytestmark = pytest.mark.learners

LAYOUTS = [
    ("qwen2", "tp2+sp"),
    ("qwen2", "cp2"),
    ("qwen2", "dp2+zero0"),
    ("qwen2", "dp2"),
    ("qwen2", "dp2+zero2"),
    ("qwen2", "dp2+zero3"),
    ("qwen2", "tp2+chunked"),
    ("qwen2", "tp2+sp+kept"),
    ("qwen2", "cp2xtp2+sp+chunked+kept"),
    ("llama, tied", "pp2"),
    ("llama, tied", "pp2xvpp2"),
    ("llama, tied", "pp2xdp2+zero3"),
    ("qwen3-moe", "ep2"),
]

# All experts of a layer work on each token: of two that are nearly tied, rounding would choose.
MODELS = parity.MODELS | {"qwen3-moe": {"family": "qwen3_moe", "num_experts_per_tok": 4}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_tiny(tmp_path_factory.mktemp("models"), **model) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def run(run_ranks, folders):
    def results(model, name, function, **more):
        case = parity.parse(name)
        arguments = {"model_dir": str(folders[model]), "layout": case.layout, "samples": parity.SAMPLES, **more}
        return run_ranks(case.ranks, function, **{**arguments, **case.options})

    return results


@pytest.fixture(scope="module")
def outcome(run, folders):
    """Of one training step, from all ranks."""
    made = {}

    def of(model, name, dtype, function=cases.gradients):
        key = (model, name, dtype, function)
        if key not in made:
            ranks = run(model, name, function, loss=UNCLIPPED, dtype=dtype)
            made[key] = collect(ranks, trained_tensors(shape_of(read_hf_config(folders[model]))))
        return made[key]

    return of


def assert_rounded(difference):
    """The difference is one that roundings of a single step in float16 may make.

    From a token to its gradient, forth and back through four layers, about 100 results are stored, each off by at most 2^-11:
    5 percent of a gradient if all of them add up, a tenth of that as they come. A log-probability behind logits below 8, each
    stored and divided by the temperature, is off by 2 x 8 x 2^-11 / 0.8, and by as much by what the layers have rounded.
    """
    assert difference.logprob < 2e-2 and difference.loss < 2e-3 and difference.gradient < 5e-2, difference


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=[f"{layout}-{model}" for model, layout in LAYOUTS])
def test_every_layout_agrees_with_one_rank_and_with_float32(outcome, model, layout):
    """Gradients must come back in the loss's own units, from all optimizers and both copies of a tied embedding."""
    own = outcome(model, layout, "float16")
    reference = parity.parse(layout).reference
    for dtype in ("float16", "float32"):
        assert_rounded(compare(own, outcome(model, reference, dtype)))


@pytest.mark.parametrize("layout", ["tp2+sp", "tp2+chunked", "cp2xtp2+sp+chunked+kept"])
def test_a_head_in_fp32_takes_scaled_gradients(outcome, run, folders, layout):
    """Its logits' gradient is in float32, in units of the scale, and is rounded to float16 for the products behind it."""
    ranks = run("qwen2", layout, cases.gradients, loss=UNCLIPPED, dtype="float16", fp32_logits=True)
    own = collect(ranks, trained_tensors(shape_of(read_hf_config(folders["qwen2"]))))
    assert_rounded(compare(own, outcome("qwen2", parity.parse(layout).reference, "float32")))


def test_gradients_that_stay_scaled_are_caught(outcome):
    """Adam would hide the factor from every loss; clipping would not, nor would the norm in the metrics."""
    sabotaged = outcome("qwen2", "dp1", "float16", float16_cases.without_unscaling)
    assert compare(sabotaged, outcome("qwen2", "dp1", "float32")).gradient > 1


@pytest.mark.parametrize(
    ("model", "layout"), [("qwen2", "tp2+sp"), ("llama, tied", "pp2xdp2+zero3"), ("qwen3-moe", "ep2")]
)
def test_a_scale_that_is_too_large_falls_until_the_model_learns(run, model, layout):
    """The first scale is a guess: its overflows must cost a few steps and nothing else.

    The rest equals, to the bit, a run on the same layout that begins with the scale which was found. With float32 only the first
    gradient is compared, and each update with its formula: see `update_cases`. A master below 2 is rounded by at most 2^-24 in
    each of up to 13 updates, 8e-7 together.
    """
    steps = 14
    ranks = run(model, layout, float16_cases.trained, steps=steps, initial=2.0**26, dtype="float16")
    skipped = sum(not np.isfinite(norm) for norm in ranks[0]["grad_norms"])
    assert 0 < skipped < steps - 3
    (exact,) = run(model, "dp1", float16_cases.trained, steps=1, initial=1.0)
    arguments = {"steps": steps - skipped, "initial": 2.0 ** (26 - skipped), "dtype": "float16"}
    for rank, rest in zip(ranks, run(model, layout, float16_cases.trained, **arguments), strict=True):
        assert rank["loss_scales"] == [2.0 ** (26 - min(step, skipped)) for step in range(steps)]
        assert not np.isfinite(rank["grad_norms"][:skipped]).any()
        assert rank["losses"][:skipped] == [rank["losses"][0]] * skipped
        for name in ("losses", "grad_norms"):
            assert rank[name][skipped:] == rest[name], name
        assert rank["grad_norms"][skipped] == pytest.approx(exact["grad_norms"][0], rel=5e-2)
        assert len(rank["errors"]) == steps - skipped and max(rank["errors"]) < 1.6e-6
        assert rank["losses"][-1] < 0.9 * rank["losses"][0]


@pytest.mark.parametrize(
    ("model", "layout"),
    [("qwen2", "tp2+sp"), ("qwen2", "dp2"), ("qwen2", "dp2+zero2"), ("llama, tied", "pp2"), ("qwen3-moe", "ep2")],
)
@pytest.mark.parametrize(("rank", "number"), [(0, 0), (1, 0), (1, -1)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(run, model, layout, rank, number):
    """Ranks, or experts and the rest, of which only some take a step, are parts of two different models from then on.

    The first parameter of tensor rank 1 is a copy, which the norm does not count; the last of expert rank 1 an expert's.
    """
    arguments = {"steps": 3, "rank": rank, "number": number, "step": 1}
    first = run(model, layout, float16_cases.trained, steps=2, initial=2.0**16, dtype="float16")[0]
    for own in run(model, layout, float16_cases.trained_with_an_overflow, **arguments):
        assert own["loss_scales"] == [2.0**16, 2.0**16, 2.0**15]
        assert np.isfinite(own["grad_norms"]).tolist() == [True, False, True]
        assert own["losses"][1] == own["losses"][2] == first["losses"][1]


@pytest.mark.parametrize("layout", [{"tensor_model_parallel_size": 2}, {"zero_stage": 2}], ids=["tp2", "dp2+zero2"])
def test_a_resumed_run_goes_on_exactly(run_ranks, folders, tmp_path, layout):
    """Updates overflow, then the scale doubles after each fourth until one overflows: it is saved between two of these."""
    arguments = {
        "model_dir": str(folders["qwen2"]),
        "groups": scored_groups(),
        "steps": 4,
        "initial": 2.0**22,
        "growth_interval": 4,
    }
    settings = SETTINGS | layout | {"model_dtype": "float16", "output_dir": str(tmp_path)}
    found = []
    for name, more in (("whole", {"save_after": 3}), ("rest", {"resume_from": f"{tmp_path}/checkpoints/step_3"})):
        folder = str(tmp_path / name)
        resume = {"resume": more["resume_from"]} if name == "rest" else {}
        found.append(run_ranks(2, float16_cases.learn, settings=settings | resume, folder=folder, **arguments, **more))
    whole, rest = found
    assert rest == whole
    saved = whole[0]["state"]["loss_scale"]
    assert saved["value"] < 2.0**22 and 0 < saved["num_finite"] < 4, saved
    truth = load_hf(tmp_path / "whole")
    for (name, own), expected in zip(load_hf(tmp_path / "rest").named_parameters(), truth.parameters(), strict=True):
        assert torch.equal(own, expected), name
