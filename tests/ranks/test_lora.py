"""Adapters on every layout against transformers alone, and what keeps trainer and engines the same policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mgrpo.models.adapters import LoraShape, adapter_tensors, lora_a, lora_b
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.table import hf_tensors
from tests.ranks import cases, lora_cases
from tests.ranks.lora_oracle import LORA, lora_oracle
from tests.ranks.outcomes import LIMITS, collect, compare, joined
from tests.ranks.test_layouts import LOSS, SAMPLES, UNCLIPPED
from tests.tiny_models import save_tiny
from tools import parity

MODELS = {
    "qwen2": {"family": "qwen2"},
    "qwen2-1kv": {"family": "qwen2", "kv_heads": 1},
    "llama-tied": {"family": "llama", "tied": True},
    "qwen3-moe": {"family": "qwen3_moe"},
    "qwen3-moe, all experts": {"family": "qwen3_moe", "num_experts_per_tok": 4},
    "deepseek": {"family": "deepseek_v3"},
    "moonlight, dense": {"family": "deepseek_v3", "q_lora_rank": None, "first_k_dense_replace": 4},
}
CASES = [
    *(("qwen2", layout) for layout in ("dp1", "tp2", "pp2+full", "pp2xvpp2", "cp2", "dp2", "dp2+zero0")),
    *(("qwen2-1kv", layout) for layout in ("tp2", "tp4+sp")),
    ("llama-tied", "tp2xpp2+sp"),
    *(("qwen3-moe", layout) for layout in ("ep2", "ep2xtp2+sp", "tp2+sp+full")),
    *(("deepseek", layout) for layout in ("dp1", "tp2+sp")),
    *(("moonlight, dense", layout) for layout in ("tp2", "pp2+full")),
]

APART = [
    *(("qwen2", layout) for layout in ("dp1+full", "tp2", "pp2xvpp2", "cp2", "dp2+zero0")),
    ("qwen2-1kv", "tp4+sp"),
    ("llama-tied", "tp2xpp2+sp"),
    ("qwen3-moe", "ep2xtp2+sp"),
    *(("moonlight, dense", layout) for layout in ("tp2", "tp2+sp")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_tiny(tmp_path_factory.mktemp("models"), **model) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def measure(run_ranks, folders, tmp_path_factory):
    """Differences of a step, and the largest one of a merged weight."""
    truths = {}

    def differences(model, layout, function=cases.gradients, loss=LOSS, **extra):
        key = model, loss["clip_lower"]
        if key not in truths:
            merged = tmp_path_factory.mktemp("merged") / model
            truths[key] = lora_oracle(folders[model], SAMPLES, loss, merged)
        case = parity.parse(layout)
        arguments = {"layout": case.layout, "samples": SAMPLES, "loss": loss, "lora": LORA, **case.options, **extra}
        ranks = run_ranks(case.ranks, function, model_dir=str(folders[model]), **arguments)
        truth, weights = truths[key]
        outcome = collect(ranks, {name: gradient.shape for name, gradient in truth.gradients.items()})
        merged = [
            np.abs(values - weights[box.name][cases.region(box)]).max()
            for rank in ranks
            for box, values in rank["merged"]
            if box.name in weights
        ]
        return compare(outcome, truth), max(merged)

    return differences


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_adapters_learn_as_transformers_does(measure, model, layout):
    """A gradient that is wrong by a factor is hidden by Adam, and one of 0 by a loss that falls more slowly."""
    difference, merged = measure(model, layout)
    assert difference.is_equal and merged <= 1e-6, (difference, merged)


@pytest.mark.parametrize(("model", "layout"), APART)
def test_adapters_beside_their_weights_learn_the_same(measure, model, layout):
    """What engines with adapters of their own compute: the delta of a rank's share must be summed with its product, once."""
    difference, merged = measure(model, layout, lora=LORA | {"is_merged": False})
    assert difference.is_equal and merged <= 1e-6, (difference, merged)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen2", "dp2+zero0"),
        ("qwen2", "dp2"),
        ("qwen2-1kv", "tp4+sp"),
        ("llama-tied", "tp2xpp2+sp"),
        ("qwen3-moe, all experts", "ep2"),
    ],
)
def test_gradients_in_float16_come_back_in_the_units_of_the_loss(measure, model, layout):
    """Adapters are float32 beside weights in float16: Megatron keeps their gradients elsewhere, and Adam hides a factor.

    The limits are those of roundings of one step: see `assert_rounded` in test_float16.py.
    """
    difference, _ = measure(model, layout, dtype="float16", loss=UNCLIPPED)
    assert difference.gradient < 5e-2 and difference.norm < 5e-2 and difference.logprob < 2e-2, difference


@pytest.mark.parametrize(
    ("sabotage", "model", "layout", "what"),
    [
        ("embeddings_want_no_gradient", "qwen2", "dp1+full", "gradient"),
        ("embeddings_want_no_gradient", "qwen2", "pp2+full", "gradient"),
        ("experts_are_not_marked", "qwen3-moe", "ep2xtp2+sp", "norm"),
        ("missing_sum_of_ranks", "qwen2", "tp2", "gradient"),
        ("missing_sum_of_ranks", "qwen3-moe", "tp2+sp", "gradient"),
        ("missing_sum_of_tokens", "qwen2", "tp2+sp", "gradient"),
        ("missing_sum_of_tokens", "moonlight, dense", "tp2+sp", "gradient"),
        ("delta_on_each_rank", "qwen2", "tp2", "logprob"),
    ],
)
def test_sabotage_is_caught(measure, sabotage, model, layout, what):
    """Recomputation without a gradient for its input, for one, leaves all gradients 0 and raises nothing."""
    difference, _ = measure(model, layout, function=lora_cases.sabotaged_gradients, sabotage=sabotage)
    assert getattr(difference, what) > 100 * LIMITS[what], difference


@pytest.mark.parametrize("model", ["qwen2", "qwen3-moe", "deepseek"])
def test_layers_compute_with_the_bytes_that_engines_get(run_ranks, folders, model):
    """In bfloat16 two ways to add an adapter are two policies: an update of less than half a step exists in one only."""
    lora = LoraShape(**LORA)
    ((merged, used, base),) = run_ranks(1, lora_cases.what_layers_use, model_dir=str(folders[model]), lora=LORA)
    plain, adapters = dict(base), cases.random_adapters(shape_of(read_hf_config(folders[model])), lora)
    assert {box.name for box in used} == {box.name for box, _ in merged if lora.adapts(box.name)}
    for box, values in merged:
        if box in used:
            np.testing.assert_array_equal(values, used[box], err_msg=box.name)
            b = adapters[lora_b(box.name)][box.start[0] : box.start[0] + box.shape[0]]
            exact = plain[box] + lora.scale * b @ adapters[lora_a(box.name)]
            # Half a step of bfloat16.
            np.testing.assert_allclose(values, exact, rtol=2**-8, atol=1e-6)
        else:
            np.testing.assert_array_equal(values, plain[box])


FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
LAYOUTS = ["dp1", "tp2xpp2+sp", "tp4", "dp2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_begin_the_same_on_every_layout(run_ranks, folders, layout):
    """With another start for another number of GPUs no run can be repeated on other machines."""
    folder, case, whole = folders["qwen2-1kv"], parity.parse(layout), {}
    arguments = {"model_dir": str(folder), "lora": LORA}
    for box, values in run_ranks(1, lora_cases.fresh, layout={}, **arguments)[0]:
        whole[box.name] = values
    assert whole.keys() == adapter_tensors(shape_of(read_hf_config(folder)), LoraShape(**LORA)).keys()
    for rank in run_ranks(case.ranks, lora_cases.fresh, layout=case.layout, **arguments):
        for box, values in rank:
            np.testing.assert_array_equal(values, whole[box.name][cases.region(box)])
    for name, values in whole.items():
        if name.endswith("lora_B.weight"):
            assert not values.any()
        else:
            assert values.std() == pytest.approx(1 / np.sqrt(3 * values.shape[1]), rel=0.2)
            assert np.abs(values).max() <= 1 / np.sqrt(values.shape[1])
    starts = [values.tobytes() for name, values in whole.items() if name.endswith("q_proj.lora_A.weight")]
    assert len(set(starts)) == len(starts)
    (other,) = run_ranks(1, lora_cases.fresh, layout={}, seed=2, **arguments)
    assert not np.array_equal(other[0][1], whole[other[0][0].name])


@pytest.mark.parametrize(
    ("model", "layout"), [("qwen2", "tp2xpp2+sp"), ("qwen2", "dp2+zero0"), ("qwen2", "cp2"), ("qwen3-moe", "ep2")]
)
def test_only_adapters_are_trained(run_ranks, folders, model, layout):
    """A base weight that moves is in no adapter that is saved; |BA| of a part of the ranks warns of the wrong thing."""
    case = parity.parse(layout)
    arguments = {"model_dir": str(folders[model]), "lora": LORA, "samples": SAMPLES}
    ranks = run_ranks(case.ranks, lora_cases.learned, layout=case.layout, **arguments)
    lora = LoraShape(**LORA)
    for rank in ranks:
        assert rank["base_is_unchanged"] and rank["holdings"]
        assert all(".adapter." in name for name in rank["trained"])
        assert any(name.endswith("lora_A.weight") for name in rank["not_finite"])
    losses = np.sum([rank["losses"] for rank in ranks], axis=0)
    assert (np.diff(losses) < 0).all()

    shape = shape_of(read_hf_config(folders[model]))
    adapters = joined(ranks, "adapters", adapter_tensors(shape, lora))
    base, merged = joined(ranks, "base", hf_tensors(shape)), joined(ranks, "merged", hf_tensors(shape))
    by_layer = {}
    for name in filter(lora.adapts, base):
        update = lora.scale * adapters[lora_b(name)] @ adapters[lora_a(name)]
        np.testing.assert_allclose(merged[name], base[name] + update, rtol=0, atol=1.5e-7)
        fused = next(parts for parts in FUSED if name.split(".")[-2] in parts)
        squares = by_layer.setdefault((name.split(".")[2], fused), np.zeros(2))
        squares += (update**2).sum(), (base[name] ** 2).sum()
    expected = np.mean([np.sqrt(update / base) for update, base in by_layer.values()])
    assert [rank["ratio"] for rank in ranks] == pytest.approx([expected] * len(ranks), rel=1e-6)


@pytest.mark.parametrize(("model", "layout"), [("qwen2", "tp2xpp2+sp"), ("qwen3-moe", "ep2xtp2+sp")])
def test_engines_get_the_merged_weights_after_an_update(run_ranks, folders, model, layout):
    """Slices that are rounded by themselves, or those of before the update, are another policy than the trainer's."""
    case = parity.parse(layout)
    arguments = {"model_dir": str(folders[model]), "lora": LORA, "samples": SAMPLES}
    ranks = run_ranks(case.ranks, lora_cases.sent, layout=case.layout, **arguments)
    shapes = hf_tensors(shape_of(read_hf_config(folders[model])))
    engine, trainer = joined(ranks, "worker", shapes), joined(ranks, "policy", shapes)
    for name in shapes:
        np.testing.assert_array_equal(engine[name], trainer[name], err_msg=name)


@pytest.mark.parametrize(
    ("model", "layout"), [("qwen2-1kv", "tp4+sp"), ("qwen2", "pp2+full"), ("llama-tied", "tp2xpp2+sp")]
)
def test_engines_beside_whose_model_adapters_are_get_only_these(run_ranks, folders, model, layout):
    """B that is scaled twice, or not at all, is another policy; so is the same adapter on other weights."""
    case, lora = parity.parse(layout), LORA | {"is_merged": False}
    arguments = {"model_dir": str(folders[model]), "lora": lora, "samples": SAMPLES}
    ranks = run_ranks(case.ranks, lora_cases.sent, layout=case.layout, **arguments)
    tensors = adapter_tensors(shape_of(read_hf_config(folders[model])), LoraShape(**lora))
    engine, trainer = joined(ranks, "worker", tensors), joined(ranks, "adapters", tensors)
    for name in tensors:
        factor = LoraShape(**lora).scale if name.endswith("lora_B.weight") else 1
        rounded = torch.from_numpy(factor * trainer[name]).to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(engine[name], rounded, err_msg=name)
    assert {rank["bytes"] for rank in ranks} == {(2 * sum(map(np.prod, tensors.values())),) * 2}
    assert "worker 0 of engine 0 does not hold the trainer's weights; 1 of" in ranks[0]["refusal"]
    assert "give every node that serves the same files in model_name_or_path" in ranks[0]["refusal"]


def test_states_exist_for_adapters_only(run_ranks, folders):
    """Buffers and moments of weights that are never updated are most of the memory that adapters save."""
    arguments = {"model_dir": str(folders["qwen2"]), "samples": SAMPLES, "layout": {}, "dtype": "bfloat16"}
    (rank,) = run_ranks(1, lora_cases.learned, lora=LORA, **arguments)
    trained = sum(values.size for _, values in rank["adapters"])
    assert rank["bytes"]["gradients"] <= 4 * trained + 4096
    assert rank["bytes"]["optimizer"] <= 8 * trained + 4096


@pytest.mark.parametrize(
    ("layout", "settings", "lora", "why"),
    [
        ({"zero_stage": 2}, {}, {}, "zero_stage=2"),
        ({"zero_stage": 3}, {}, {}, "zero_stage=3"),
        ({}, {"transformer_impl": "transformer_engine"}, {}, "transformer_impl"),
        ({"pipeline": 2}, {}, {"targets": ("w1",)}, "lora_target_modules=w1"),
    ],
)
def test_what_adapters_cannot_do_is_refused(run_ranks, folders, layout, settings, lora, why):
    """Megatron-FSDP would fail in the first backward pass, and a stage without adapters in its optimizer."""
    arguments = {"model_dir": str(folders["qwen2"]), "layout": layout, "settings": settings, "lora": LORA | lora}
    for message in run_ranks(2, lora_cases.refused, **arguments):
        assert why in message
