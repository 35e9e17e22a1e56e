"""Training steps whose layers are Transformer Engine's: its stand-in holds, sends and multiplies what is planned from its source.

A process of its own rehearses them, in which Megatron finds Transformer Engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from mgrpo.planner.comparison import AXES, compare
from tests.unit.rehearsal.layouts import ENGINE_CASES
from tests.unit.rehearsal.test_rehearsal import QUIET, Rehearsals, described, is_allowed, plan_of

pytestmark = pytest.mark.learners

SIZES = "eight_bit_experts.py:"
"""The host asks for the number of rows of each expert, which Transformer Engine wants on the host."""


@pytest.fixture(scope="module")
def rehearsals() -> Iterator[Rehearsals]:
    started = Rehearsals("--stands-in")
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


EVERY_RANK = [
    pytest.param(name, rank, id=f"{name}, rank {rank}") for name, case in ENGINE_CASES.items() for rank in case.ranks
]


@pytest.mark.parametrize(("name", "rank"), EVERY_RANK)
def test_the_step_runs_on_layers_of_transformer_engine(rehearsals, name, rank):
    """A width that its kernels refuse, a matrix that is not rounded, or a wait in every layer, would show on a GPU only."""
    found = rehearsals.of(name, rank)
    assert "error" not in found, described(found)
    assert any("a stand-in for those of Transformer Engine" in remark for remark in found["remarks"])
    waits = [wait for wait in found["waits"] if wait[0] in QUIET and not is_allowed(wait[2])]
    assert all(SIZES in wait[2] for wait in waits), waits
    assert [upload for upload in found["uploads"] if upload[0] in QUIET] == []


@pytest.mark.parametrize(("name", "rank"), EVERY_RANK)
def test_it_holds_sends_and_multiplies_what_is_planned(rehearsals, name, rank):
    """The plan is from the source, number by number; a copy of the weights more is a tenth of a large model's memory."""
    plan = plan_of(name)
    lines = {(line.section, line.name): line for line in compare(plan, rehearsals.of(name, rank))}
    held = lines["memory", "transformer_engine"]
    # Each tensor of a small model is rounded up.
    assert held.rehearsed == pytest.approx(held.planned, rel=2e-3, abs=2**12), held
    for kind in ("parameters", "gradients", "optimizer"):
        assert lines["memory", kind].rehearsed == pytest.approx(lines["memory", kind].planned, rel=5e-3)
    for axis in AXES:
        if ("sent", axis) in lines:
            assert lines["sent", axis].rehearsed == pytest.approx(lines["sent", axis].planned, rel=0.02), axis
    if plan.config.parallel.fp8 != "none":
        products = lines["operations", "of these in 8 bits"]
        assert products.rehearsed == pytest.approx(products.planned, rel=1e-6) and products.planned > 0
    else:
        assert ("operations", "of these in 8 bits") not in lines


@pytest.mark.parametrize("name", ["8 bits", "8 bits, recompute full", "8 bits, experts", "8 bits, pipeline"])
def test_activations_take_the_planned_memory(rehearsals, name):
    """Products keep their inputs in 8 bits, attention and the router as they are: a plan that forgets either misses a fifth."""
    lines = {line.name: line for line in compare(plan_of(name), rehearsals.of(name, 0))}
    passes = lines["whole weights, passes"]
    assert passes.rehearsed == pytest.approx(passes.planned, rel=0.06), passes


def test_without_8_bits_no_product_is_in_them(rehearsals):
    """And with them the LM head's alone are not: on one rank, of a model without experts."""
    counted = {}
    for name in ("as they are", "8 bits"):
        flops = Counter[str]()
        for _phase, kind, count in rehearsals.of(name, 0)["flops"]:
            flops[kind] += count
        counted[name] = flops
    assert counted["as they are"]["products in 8 bits"] == 0
    assert counted["8 bits"]["products in 8 bits"] > 10 * counted["8 bits"]["products"]


def test_sizes_of_experts_are_asked_for_once_in_each_layer(rehearsals):
    """Of two layers and one micro-batch; not again for the backward pass."""
    found = rehearsals.of("8 bits, experts", 0)
    assert [wait[3] for wait in found["waits"] if SIZES in wait[2] and wait[0] == "forward"] == [2]
    assert not [wait for wait in found["waits"] if SIZES in wait[2] and wait[0] == "backward"]
