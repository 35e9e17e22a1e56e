"""Tokens that reach their experts by Megatron's flex dispatcher and DeepEP or HybridEP, for whose kernels gloo stands in, against transformers."""

from __future__ import annotations

import pytest

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from tests.ranks import activation_cases, cases
from tests.ranks.test_layouts import LOSS, SAMPLES, check, oracle
from tests.routed import routed
from tests.tiny_models import save_tiny

HYBRID = {"moe_token_dispatcher_type": "hybridep"}
LAYOUTS = {
    "ep2": ({"expert": 2}, {}),
    "ep2, recomputed": ({"expert": 2}, {"recompute_granularity": "full"}),
    "ep2+tp2+sp": ({"expert": 2, "tensor": 2, "sequence_parallel": True}, {}),
    "tp2+sp, of each expert a half": ({"tensor": 2, "sequence_parallel": True}, {}),
    "hybridep, ep2": ({"expert": 2}, HYBRID),
    "hybridep, ep2, recomputed": ({"expert": 2}, HYBRID | {"recompute_granularity": "full"}),
    "cp2": ({"expert": 2, "context": 2}, {"recompute_granularity": "selective", "recompute_modules": ("moe",)}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder, samples and truth, without choices of engines and with them."""
    own = save_tiny(tmp_path_factory.mktemp("models"), "qwen3_moe")
    shape = shape_of(read_hf_config(own))
    mixtures = sum(map(shape.has_experts, range(shape.num_layers)))
    chosen = routed(SAMPLES, mixtures, shape.experts.count, shape.experts.top_k)
    return {
        mode: (own, samples, oracle(own, samples, LOSS)) for mode, samples in (("none", SAMPLES), ("rollout", chosen))
    }


@pytest.mark.parametrize("mode", ["none", "rollout"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_the_models(run_ranks, models, layout, mode):
    """Packs differ in length, and DeepEP is asked for the experts of the largest weights, which the engines' choice may not be."""
    folder, samples, truth = models[mode]
    sizes, settings = LAYOUTS[layout]
    arguments = {"model_dir": str(folder), "layout": sizes, "samples": samples, "loss": LOSS, "pack_length": 64}
    ranks = run_ranks(2, cases.gradients_by_deep_ep, settings={"routing_replay": mode, **settings}, **arguments)
    check(ranks, truth)
    assert all(rank["dispatched"] > 0 for rank in ranks)


@pytest.mark.parametrize("recomputed", ["full", "moe"])
@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep", "hybridep"])
def test_nothing_of_a_layer_is_held_when_its_passes_are_over(run_ranks, models, dispatcher, recomputed):
    """Probabilities with a graph would hold the input of every layer that is computed again, and the gradient of that, until the next
    step: 2 GiB of a rank that has 32 layers of 8,192 tokens of 4,096 numbers."""
    folder, samples, _ = models["none"]
    again = {
        "full": {"recompute_granularity": "full"},
        "moe": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    }[recomputed]
    arguments = {"model_dir": str(folder), "layout": {"expert": 2}, "samples": samples, "loss": LOSS, "settings": again}
    for rank in run_ranks(2, activation_cases.held_inputs, dispatcher=dispatcher, **arguments):
        assert rank["inputs"] > 0 and rank["held"] == 0, rank
