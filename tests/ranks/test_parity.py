"""A subset of the published matrix of layouts (`make parity` runs all of it), and proof that it would notice."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.table import trained_tensors
from tests.ranks import cases, update_cases
from tests.ranks.outcomes import collect, compare, joined
from tests.tiny_models import save_tiny
from tools import parity

SUBSET = {
    "qwen2": (
        "cp2+a2a",
        "pp2+first1",
        "tp4+sp",
        "cp2xtp2+sp",
        "tp2xdp2+sp+zero3",
        "dp4+zero3+shard2",
        "dp1+unpacked",
        "dp1+zero3",
        "tp2+zero2",
        "pp2xdp2+zero2+selective",
        "pp2xdp2+zero3+selective",
        "cp2xtp2+sp+chunked+kept",
    ),
    "qwen3 (QK norm)": ("tp2", "tp2+sp", "tp2+sp+kept", "cp2xpp2", "dp2+zero2", "dp1+selective"),
    "llama, tied": (
        "pp2xvpp2",
        "tp2xpp2xvpp2+sp",
        "pp2xdp2+zero3",
        "cp2xdp2",
        "dp2+zero0",
        "tp2+sp+full",
        "pp2xdp2+zero2+full",
    ),
    "qwen3-moe": ("ep2", "ep2xtp2+sp", "ep2xpp2", "ep2xcp2", "ep2xdp4+zero3", "tp2xpp2+sp"),
    "qwen3-moe, 6 layers": ("pp2xvpp2+first3+last3", "pp2xvpp2+first3+last3+full", "pp2xvpp2+first2"),
    "deepseek-v3": ("ep2xdp4+zero3",),
}
CASES = [(model, layout) for model, layouts in SUBSET.items() for layout in layouts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: save_tiny(tmp_path_factory.mktemp("parity"), **arguments) for name, arguments in parity.MODELS.items()
    }


@pytest.fixture(scope="module")
def measure(run_ranks, folders):
    references = {}

    def outcome(model, name, function=cases.gradients, **extra):
        case = parity.parse(name)
        arguments = {"layout": case.layout, "samples": parity.SAMPLES, "loss": parity.LOSS, **case.options, **extra}
        ranks = run_ranks(case.ranks, function, model_dir=str(folders[model]), **arguments)
        return collect(ranks, trained_tensors(shape_of(read_hf_config(folders[model]))))

    def difference(model, name, **extra):
        reference = parity.parse(name).reference
        if (model, reference) not in references:
            references[model, reference] = outcome(model, reference)
        return compare(outcome(model, name, **extra), references[model, reference])

    return difference


@pytest.mark.parametrize(("model", "layout"), CASES, ids=[f"{layout}-{model}" for model, layout in CASES])
def test_layout_equals_one_rank(measure, model, layout):
    """An axis that loses, doubles or mixes up a gradient trains another model than one rank would, without an error."""
    difference = measure(model, layout)
    assert difference.is_equal, difference


@pytest.mark.parametrize(
    ("sabotage", "model", "layout"),
    [
        ("doubled_all_reduce", "qwen2", "tp2"),
        ("missing_sequence_parallel_sum", "qwen3 (QK norm)", "tp2+sp"),
        ("swapped_gate_and_up", "qwen2", "tp2"),
        ("missing_context_sum", "qwen2", "cp2"),
        ("boundary_token_untrained", "qwen2", "cp2"),
        ("missing_tied_sum", "llama, tied", "pp2xdp2+zero3"),
    ],
)
def test_sabotage_is_caught(measure, sabotage, model, layout):
    """A matrix of equal layouts proves nothing if it also calls broken ones equal."""
    difference = measure(model, layout, function=cases.sabotaged_gradients, sabotage=sabotage)
    assert not difference.is_equal, difference


def test_every_published_layout_is_sound():
    """A row of the matrix that validation refuses could never be run by a user."""
    from mgrpo.layout import Layout

    for name in (*parity.MATRIX, *(layout for _, layout in CASES)):
        case = parity.parse(name)
        assert Layout(world_size=case.ranks, **case.layout).problems() == [], name
    assert len(parity.MATRIX) >= 24


def test_the_page_has_every_case():
    """Who adds a family reads in docs/parity.md that it is equal in layouts which nobody has run."""
    page = (Path(parity.__file__).parents[1] / "docs" / "parity.md").read_text()
    rows = re.findall(r"^\| (\S+) \| \d+ \| ([^|]+) \|.*\| equal \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted((layout, model) for layout, models in parity.MATRIX.items() for model in models)
    assert f"{len(rows)} of {len(rows)} cases equal one rank, {len(parity.MATRIX)} layouts" in page


@pytest.mark.parametrize("name", ["tp", "tp2xqq2", "tp2+magic", ""])
def test_unknown_layout_is_refused(name):
    """A misspelt layout that ran as another would be believed."""
    with pytest.raises(ValueError, match=r"axis|option"):
        parity.parse(name)


ZERO_STAGES = (0, 1, 2, 3)


def test_zero_stages_learn_the_same_in_float32(run_ranks, folders):
    """Adam hides a gradient that is wrong by a factor; norms do not."""
    arguments = {"model_dir": str(folders["qwen2"]), "samples": parity.SAMPLES}
    found = {stage: run_ranks(4, cases.train_steps, layout={"zero_stage": stage}, **arguments) for stage in ZERO_STAGES}
    for stage in ZERO_STAGES[1:]:
        for name in ("losses", "grad_norms"):
            # Four times what sums in another order were seen to make.
            assert found[stage][0][name] == pytest.approx(found[0][0][name], rel=1e-6), (stage, name)


def test_zero_stages_agree_in_bfloat16_and_save_memory(run_ranks, folders):
    """Masters beside the weights: one that gets a part of its gradient, or does not reach the weights, trains another model.

    And a stage that saves nothing is only slower. From equal weights each rank's gradients are the same to the bit, and their
    sums in float32 over four ranks differ by their order alone; a first update at a rate that equals epsilon differs by no more
    than its gradient, which is clipped to 1. See `update_cases` for what is not compared.
    """
    arguments = {"model_dir": str(folders["qwen2"]), "samples": parity.SAMPLES, "dtype": "bfloat16"}
    found = {
        stage: run_ranks(4, update_cases.first_update, layout={"zero_stage": stage}, **arguments)
        for stage in ZERO_STAGES
    }
    shapes = trained_tensors(shape_of(read_hf_config(folders["qwen2"])))
    truth = {kind: joined(found[0], kind, shapes) for kind in ("gradients", "masters")}
    for stage, ranks in found.items():
        own = {kind: joined(ranks, kind, shapes) for kind in truth}
        for name in shapes:
            largest = np.abs(truth["gradients"][name]).max()
            np.testing.assert_allclose(own["gradients"][name], truth["gradients"][name], rtol=0, atol=1e-6 * largest)
            np.testing.assert_allclose(own["masters"][name], truth["masters"][name], rtol=0, atol=1e-6)
        for rank in ranks:
            assert rank["grad_norm"] == pytest.approx(found[0][0]["grad_norm"], rel=1e-6), stage
            assert {box.name for box, _ in rank["read"]} == shapes.keys()
            for box, values in rank["read"]:
                master = torch.from_numpy(own["masters"][box.name][cases.region(box)])
                np.testing.assert_array_equal(values, master.bfloat16().float(), err_msg=box.name)
    for rank in range(4):
        held = {stage: found[stage][rank]["bytes"] for stage in found}
        assert held[1]["optimizer"] < 0.3 * held[0]["optimizer"]
        assert held[2]["gradients"] < 0.3 * held[1]["gradients"]
        assert held[3]["parameters"] < 0.8 * held[2]["parameters"]


def test_replayed_routing_is_what_was_recorded(run_ranks, folders):
    """With replay a token keeps its experts after an update that would have sent it elsewhere; without, it does not."""
    arguments = {"model_dir": str(folders["qwen3-moe"]), "samples": parity.SAMPLES}
    for layout, ranks in (({"expert": 2}, 2), ({"tensor": 2, "sequence_parallel": True, "expert": 2}, 2)):
        replayed = run_ranks(ranks, cases.routing, layout=layout, replays=True, **arguments)
        free = run_ranks(ranks, cases.routing, layout=layout, replays=False, **arguments)
        assert all(rank["changed"] == 0 for rank in replayed)
        assert any(rank["changed"] > 0 for rank in free)
        assert all(torch.isfinite(torch.tensor(rank["loss"])) for rank in replayed)
