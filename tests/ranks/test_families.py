"""Every family, and every way to scale RoPE, against transformers: logits and gradients, on one rank and on two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import cases, test_layouts
from tests.ranks.outcomes import Outcome
from tests.ranks.test_layouts import LOSS, check, oracle
from tests.ranks.test_logits import compare
from tests.tiny_models import FAMILIES, VOCAB, save_tiny

SAMPLES = [*test_layouts.SAMPLES, *cases.long_samples(seed=0)]
TENSOR = {"tensor": 2, "sequence_parallel": True}
STAGES = {"pipeline": 2}
MIXTURES = (
    "mixtral",
    "qwen3_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "kimi_k2",
    "qwen3_next",
    "qwen3_5_moe_text",
    "gpt_oss",
)


def scaled(**rope: Any) -> dict[str, Any]:
    """Settings of RoPE whose angles differ between the samples' tokens."""
    return {"rope_parameters": {"rope_theta": 100.0} | rope}


OUT_BIAS = "seed_oss, output projection with a bias"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    OUT_BIAS: ("seed_oss", {"attention_out_bias": True}),
    "llama3 RoPE": (
        "llama",
        scaled(
            rope_type="llama3",
            factor=6.0,
            low_freq_factor=0.5,
            high_freq_factor=3.0,
            original_max_position_embeddings=8,
        ),
    ),
    "yarn RoPE": (
        "llama",
        scaled(
            rope_type="yarn",
            factor=4.0,
            beta_fast=0.9,
            beta_slow=0.1,
            truncate=False,
            original_max_position_embeddings=8,
        ),
    ),
    "linear RoPE": ("llama", scaled(rope_type="linear", factor=3.0)),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "mixtral with windows": ("mixtral", {"sliding_window": 4}),
    "qwen3_moe, weights as they are": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "gemma2, tied": ("gemma2", {"tied": True}),
    "qwen3_5_text, one key-value head": ("qwen3_5_text", {"kv_heads": 1, "tied": True}),
    "moonlight": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, **scaled(rope_type="default")},
    ),
    "latent attention of odd sizes": (
        "deepseek_v3",
        {
            "first_k_dense_replace": 2,
            "heads": 6,
            "q_lora_rank": 7,
            "kv_lora_rank": 9,
            "qk_nope_head_dim": 5,
            "qk_rope_head_dim": 6,
            "v_head_dim": 3,
            **scaled(rope_type="yarn", factor=4.0, beta_fast=0.9, beta_slow=0.1, original_max_position_embeddings=8),
        },
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    families = {name: save_tiny(folder, name, layers=2) for name in FAMILIES}
    variants = {name: save_tiny(folder, family, layers=2, **own) for name, (family, own) in VARIANTS.items()}
    return families | variants | {"gemma3_text, deep": save_tiny(folder, "gemma3_text")}


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Callable[[str], Outcome]:
    """The oracle's outcome of a model."""
    return functools.cache(lambda name: oracle(folders[name], SAMPLES, LOSS))


def run(run_ranks, folders, name, world_size, layout, **options):
    arguments = {"model_dir": str(folders[name]), "layout": layout, "samples": SAMPLES, "loss": LOSS}
    return run_ranks(world_size, cases.gradients, pack_length=192, **arguments, **options)


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_logits_of_every_family_equal_transformers(run_ranks, folders, name):
    """A window, norm, cap or angle that is slightly other trains a slightly other model, and nothing says so."""
    samples = [*cases.random_samples(seed=3, groups=3, group_size=2), *cases.long_samples(seed=3)]
    for world_size, layout in ((1, {}), (2, TENSOR), (2, STAGES)):
        compare(run_ranks, folders[name], world_size, layout, samples, VOCAB)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_every_family_equal_transformers(run_ranks, folders, truth, name):
    """Logits may be right with a gradient that stops at a norm, misses the router, or is not summed over ranks."""
    for world_size, layout in ((1, {}), (2, TENSOR), (2, STAGES), (2, {"context": 2})):
        check(run(run_ranks, folders, name, world_size, layout), truth(name))
    # Without branches, layers have other masks, and states begin elsewhere.
    check(run(run_ranks, folders, name, 1, {}, share_prompts=False), truth(name))


def test_a_norm_of_whole_projections_needs_no_sequence_parallelism(run_ranks, folders, truth):
    """Megatron sums the gradients of norms of queries and keys over tensor ranks by their name; these are split."""
    check(run(run_ranks, folders, "olmo3", 2, {"tensor": 2}), truth("olmo3"))


@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_do_not_depend_on_where_experts_are(run_ranks, folders, truth, name):
    """Experts of another rank are named, loaded and reduced apart from the rest of the model."""
    check(run(run_ranks, folders, name, 2, {"expert": 2}), truth(name))


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2}, TENSOR, STAGES, {"context": 2}, {"context": 2, "cp_comm_type": "a2a"}, {}],
    ids=["tp2", "tp2+sp", "pp2", "cp2", "cp2+a2a", "dp2"],
)
@pytest.mark.parametrize("name", ["moonlight", "latent attention of odd sizes"])
def test_gradients_of_latent_attention_do_not_depend_on_the_layout(run_ranks, folders, truth, name, layout):
    """What heads of several ranks have in common, latents and the rotated key, gets a part of its gradient from each of them."""
    if name == "moonlight" and layout == {"tensor": 2}:
        pytest.skip("experts need sequence parallelism")
    settings = {key: value for key, value in layout.items() if key == "cp_comm_type"}
    axes = {key: value for key, value in layout.items() if key != "cp_comm_type"}
    check(run(run_ranks, folders, name, 2, axes, settings=settings), truth(name))


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("world_size, layout", [(1, {}), (2, TENSOR)], ids=["one rank", "tp2+sp"])
def test_recomputed_latent_attention_has_the_same_gradients(run_ranks, folders, truth, world_size, layout, granularity):
    """Queries, keys and values differ in their dimensions, and all three have gradients."""
    options = {"settings": {"recompute_granularity": granularity}}
    check(run(run_ranks, folders, "deepseek_v3", world_size, layout, **options), truth("deepseek_v3"))


def test_layers_know_their_place_in_interleaved_stages(run_ranks, folders, truth):
    """Windows and angles differ from layer to layer: a layer that counts from its chunk takes its neighbour's."""
    name, layout = "gemma3_text, deep", {"pipeline": 2, "virtual_pipeline": 2}
    check(run(run_ranks, folders, name, 2, layout), truth(name))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_windows_caps_and_sinks_go_with_heads_that_change_ranks(run_ranks, folders, truth, name):
    """A rank that has all queries of some heads needs their sinks, and windows of the whole document."""
    options = {"settings": {"cp_comm_type": "a2a"}}
    check(run(run_ranks, folders, name, 2, {"context": 2}, **options), truth(name))


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_recomputed_layers_take_the_same_angles(run_ranks, folders, truth, name):
    """Recomputation hands a layer's inputs through Megatron's checkpointing, two kinds of angles among them."""
    options = {"settings": {"recompute_granularity": "full"}}
    check(run(run_ranks, folders, name, 1, {}, **options), truth(name))


@pytest.mark.parametrize("layout", [TENSOR, {"expert": 2}, {"zero_stage": 3}], ids=str)
def test_tensors_of_all_experts_come_back_from_every_layout(run_ranks, folders, tmp_path, layout):
    """Each rank holds some columns of some experts as rows of its own; the checkpoint has one tensor of three dimensions."""
    arguments = {
        "model_dir": str(folders["gpt_oss"]),
        "layout": layout,
        "samples": test_layouts.SAMPLES,
        "folder": str(tmp_path / "out"),
    }
    run_ranks(2, cases.trained_export, steps=0, **arguments)
    written, given = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", folders["gpt_oss"]))
    assert written.keys() == given.keys()
    assert all(torch.equal(written[name], given[name]) for name in given)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_tensor_ranks_share_out_is_marked_as_a_share(run_ranks, folders, name):
    """Megatron's gradient norm counts a marked parameter on every tensor rank and others on the first: clipping depends on it."""
    for shares in run_ranks(2, cases.marks, model_dir=str(folders[name]), layout=TENSOR):
        wrong = [parameter for parameter, is_share, is_marked in shares if is_share != is_marked]
        assert not wrong


@pytest.mark.parametrize("layout", [{"tensor": 2}, TENSOR, {"context": 2}], ids=str)
def test_a_bias_of_the_output_projection_alone_is_trained(run_ranks, folders, truth, layout):
    """Each tensor rank has the whole bias, adds it once, and with sequence parallelism sees the gradient of its tokens alone."""
    check(run(run_ranks, folders, OUT_BIAS, 2, layout), truth(OUT_BIAS))


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_gates_follow_their_heads(run_ranks, folders, truth, layout):
    """Tensor ranks with a copy of one key-value head get the gates of all its heads from Megatron, and the norm of a delta net is
    not one that Megatron sums over ranks."""
    name = "qwen3_5_text, one key-value head"
    check(run(run_ranks, folders, name, 2, layout), truth(name))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_states_go_over_context_parallel_ranks(run_ranks, folders, truth, name):
    """A rank that begins each of its stretches with an empty state trains a model that forgets there."""
    options = {"settings": {"cp_comm_type": "a2a"}}
    check(run(run_ranks, folders, name, 2, {"context": 2}, **options), truth(name))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_delta_nets_have_the_same_gradients(run_ranks, folders, truth, recompute):
    """The convolution's weight and the decays are operands of what is computed again, and want gradients."""
    options = {"settings": {"recompute_granularity": recompute}}
    check(run(run_ranks, folders, "qwen3_next", 1, {}, **options), truth("qwen3_next"))
