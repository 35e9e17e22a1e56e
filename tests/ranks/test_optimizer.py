"""The update of the weights, and messages between pipeline stages: faster ways that must compute the same."""

from __future__ import annotations

import pytest

from tests.ranks import optimizer_cases as cases
from tests.tiny_models import save_tiny
from tools import parity

pytestmark = pytest.mark.learners


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_tiny(tmp_path_factory.mktemp("models"), **model) for name, model in parity.MODELS.items()}


@pytest.fixture
def run(run_ranks, folders):
    def results(name, function, model="qwen2", **more):
        case = parity.parse(name)
        arguments = {"model_dir": str(folders[model]), "layout": case.layout, "samples": parity.SAMPLES, **more}
        return run_ranks(case.ranks, function, settings=case.options["settings"], **arguments)

    return results


def test_norm_and_clipping_equal_megatrons(run_ranks):
    """A norm of another formula clips other steps; one that waits for each tensor drains the GPU hundreds of times."""
    (found,) = run_ranks(1, cases.norm_and_scale, seed=3)
    assert found["own"]["norm"] == pytest.approx(found["expected"]["norm"], rel=1e-6)
    for own, expected in zip(found["own"]["scaled"], found["expected"]["scaled"], strict=True):
        assert own == pytest.approx(expected, rel=1e-6)
    assert found["empty"] == 0
    assert found["waits"] == 1


@pytest.mark.parametrize("layout", ["dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_adam_equals_its_formula(run, layout, dtype):
    """One kernel for all of Adam that misses a shard or a step trains another model.

    An update computes in float32, whatever the model's type. In five steps a master below 2 is rounded five times by at most
    2^-24, 3e-7 together, and the limit is twice that; a step moves most masters by more than 1e-3.
    """
    ranks = run(layout, cases.trained, dtype=dtype, steps=5)
    for rank in ranks:
        assert rank["num_fused"] > 0
        assert len(rank["errors"]) == 5 and max(rank["errors"]) < 6e-7, rank["errors"]
        assert rank["losses"][-1] < 0.9 * rank["losses"][0]


@pytest.mark.parametrize("layout", ["pp2", "tp2xpp2xvpp2+sp"])
def test_stages_send_no_shapes(run, layout):
    """Each message would wait for the device twice. The order of packs of different lengths is `test_parity`'s."""
    ranks = run(layout, cases.shapes_sent, model="llama, tied", loss=parity.LOSS)
    assert all(rank["grad_norm"] > 0 for rank in ranks)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen2", "dp2+zero0"),
        ("qwen2", "dp2"),
        ("llama, tied", "dp2"),
        ("llama, tied", "pp2xdp2"),
        ("qwen2", "pp2xvpp2xdp2"),
        ("qwen2", "dp2+full"),
        ("qwen3 (QK norm)", "cp2xtp2+sp"),
        ("qwen3-moe", "ep2"),
        ("qwen3-moe", "ep2xdp4"),
    ],
)
def test_overlapped_gradients_are_the_same(run, model, layout):
    """A bucket that is summed before its last gradient has come loses what comes after, and no error says so."""
    (truth,) = run("dp1", cases.overlapped, model=model, steps=3, overlaps=False)
    assert not any(any(buckets) for buckets in truth["on_their_way"])
    for own in run(layout, cases.overlapped, model=model, steps=3, overlaps=True):
        assert own["losses"] == pytest.approx(truth["losses"], rel=1.2e-6)
        assert own["grad_norms"] == pytest.approx(truth["grad_norms"], rel=1.2e-6)
        assert len(own["sums"]) > 1 and set(own["sums"]) == {3}
        # The first step only counts which gradients there are.
        assert all(map(all, own["on_their_way"][len(own["on_their_way"]) // 3 :]))


@pytest.mark.parametrize(
    ("model", "layout"), [("qwen3-moe", "ep2"), ("qwen3-moe", "ep2xdp4"), ("qwen2", "pp2xvpp2xdp2")]
)
def test_parameters_are_gathered_once(run, model, layout):
    """Optimizers of experts and of the rest that both gather everything double the traffic of each update."""
    for rank in run(layout, cases.overlapped, model=model, steps=3, overlaps=True):
        assert set(rank["gathers"]) == {3}
