"""Experts that an engine chose, in every layout, against transformers told to choose the same ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from tests.ranks import cases
from tests.ranks.test_layouts import LOSS, SAMPLES, check, oracle
from tests.routed import routed
from tests.tiny_models import load_hf, save_tiny

FULL = {"recompute_granularity": "full"}
PART = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
STAGES = {"pipeline": 2}
CHUNKS = {"pipeline": 2, "virtual_pipeline": 2}
LAYOUTS = {
    "one rank": (1, {}, {}),
    "one rank, recomputed": (1, {}, FULL),
    "tp2+sp": (2, {"tensor": 2, "sequence_parallel": True}, {}),
    "tp2+sp, recomputed": (2, {"tensor": 2, "sequence_parallel": True}, PART),
    "pp2": (2, STAGES, {}),
    "pp2, recomputed": (2, STAGES, FULL),
    "pp2 in chunks": (2, CHUNKS, {}),
    "pp2 in chunks, recomputed": (2, CHUNKS, PART),
    "cp2": (2, {"context": 2}, {}),
    "ep2": (2, {"expert": 2}, {}),
    "dp2": (2, {}, {}),
    "dp2+zero3": (2, {"zero_stage": 3}, {}),
    "ep2 x tp2+sp": (4, {"expert": 2, "tensor": 2, "sequence_parallel": True}, {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders, samples with routes, and what transformers makes of them; dense layers lie between and before the mixtures."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for name in ("qwen3_moe", "glm4_moe"):
        own = save_tiny(folder, name, layers=4)
        shape = shape_of(read_hf_config(own))
        mixtures = sum(map(shape.has_experts, range(shape.num_layers)))
        samples = routed(SAMPLES, mixtures, shape.experts.count, shape.experts.top_k)
        found[name] = own, samples, oracle(own, samples, LOSS)
    return found


def run(run_ranks, models, name, world_size, layout, settings, **options):
    folder, samples, _ = models[name]
    settings = {"routing_replay": "rollout", **settings}
    arguments = {"model_dir": str(folder), "layout": layout, "samples": samples, "loss": LOSS}
    return run_ranks(world_size, cases.gradients, settings=settings, **arguments, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_experts_are_the_engines_in_every_layout(run_ranks, models, name, layout):
    """A row that is off by one token, layer or rank trains experts that the token never went to."""
    check(run(run_ranks, models, name, *LAYOUTS[layout]), models[name][2])


@pytest.mark.parametrize("share_prompts, pack_length", [(False, 64), (True, 32), (True, 512)])
def test_experts_do_not_depend_on_packing(run_ranks, models, share_prompts, pack_length):
    """Rows of a pack are not those of its samples: prompts are shared, last tokens are left out, and documents are padded."""
    options = {"share_prompts": share_prompts, "pack_length": pack_length}
    check(run(run_ranks, models, "qwen3_moe", 1, {}, {}, **options), models["qwen3_moe"][2])


def test_without_replay_routers_choose(run_ranks, models):
    """Otherwise the comparisons above compare nothing."""
    found = run(run_ranks, models, "qwen3_moe", 1, {}, {"routing_replay": "none"})
    with pytest.raises(AssertionError):
        check(found, models["qwen3_moe"][2])


@pytest.mark.parametrize("layout", [(1, {}), (2, {"tensor": 2, "sequence_parallel": True}), (2, {"context": 2})])
def test_old_logprobs_are_of_the_same_experts(run_ranks, models, layout):
    """The ratio of the first update would not be 1. A reference model chooses for itself."""
    folder, samples, _ = models["qwen3_moe"]
    for rank in run_ranks(layout[0], cases.replayed_scores, model_dir=str(folder), layout=layout[1], samples=samples):
        assert rank["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert rank["reference"] > 1e-3
        assert 0 < rank["differing"] < rank["fixed"]


@pytest.fixture(scope="module")
def router_choices(tmp_path_factory):
    """A model whose first layer is dense, samples, and how many tokens transformers' routers give to each expert of the others."""
    folder = save_tiny(tmp_path_factory.mktemp("loads"), "glm4_moe", layers=4)
    model = load_hf(folder)
    samples, chosen = SAMPLES[:6], {}
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    for place, router in enumerate(routers):
        router.register_forward_hook(lambda *call, place=place: chosen.setdefault(place, []).append(call[-1][2]))
    for sample in samples:
        tokens = np.concatenate([sample.prompt_tokens, sample.tokens])[:-1]
        model(torch.from_numpy(tokens.astype(np.int64))[None])
    counts = [torch.bincount(torch.cat(rows).flatten(), minlength=8).tolist() for _, rows in sorted(chosen.items())]
    return folder, samples, np.array(counts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loads_of_experts_are_those_of_transformers_routers(run_ranks, router_choices, layout):
    """Counted once, whatever scores or computes a layer again, on whatever rank; beside them what fills packs up."""
    folder, samples, expected = router_choices
    ranks, layout, settings = LAYOUTS[layout]
    arguments = {"model_dir": str(folder), "layout": layout, "samples": samples, "settings": settings}
    for counts, again in run_ranks(ranks, cases.expert_loads, **arguments):
        beside = np.array(counts) - expected
        assert beside.shape == expected.shape and not np.any(again)
        assert beside.min() >= 0 and len(set(beside.sum(1))) == 1
        assert beside.sum() <= (0 if ranks == 1 else expected.sum() / 4)
