"""Reading a config.json: what can be built exactly, and refusal of the rest."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import pytest
import transformers

from mgrpo.models.family import FAMILIES, shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.rope import Rope
from mgrpo.models.shape import Experts, ModelShape

SMALL = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 125,
}
QWEN2 = {"model_type": "qwen2", "rope_theta": 1e6} | SMALL
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
HUB: dict[str, dict[str, Any]] = {
    # As published: sizes apart, all keys that say how the model computes, in the spelling of their day.
    "llama 3.2": {
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "head_dim": 16,
    },
    "mistral 7B v0.1": {
        "model_type": "mistral",
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    "mistral 7B v0.3": {
        "model_type": "mistral",
        "sliding_window": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "mixtral 8x7B": {
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "max_position_embeddings": 32768,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "head_dim": 64,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
    "qwen2.5 7B": {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
    "qwen2 with windows": {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "sliding_window": 1024,
        "use_sliding_window": True,
        "max_window_layers": 5,
    },
    "qwen3 8B, stretched": {
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "max_position_embeddings": 131072,
    },
    "qwen3 30B-A3B": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "rope_theta": 1e6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "moe_intermediate_size": 24,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_sliding_window": False,
        "max_position_embeddings": 40960,
    },
    "olmo 2 7B": {
        "model_type": "olmo2",
        "rope_theta": 500000,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "olmo 3 7B": {
        "model_type": "olmo3",
        "rope_theta": 500000,
        "rope_scaling": YARN,
        "sliding_window": 4096,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
    },
    "gemma 2 2B": {
        "model_type": "gemma2",
        "head_dim": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
    },
    "gemma 3 1B": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
    },
    "glm 4.5 air": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "gemma 3 with linear RoPE": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "deepseek v3": DEEPSEEK_V3,
    "kimi k2": DEEPSEEK_V3
    | {
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0},
    },
    "moonlight 16B-A3B": DEEPSEEK_V3
    | {
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 50000.0,
    },
    "glm 4.7 flash": {
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "partial_rotary_factor": 1.0,
        "rope_theta": 1e6,
        "num_nextn_predict_layers": 1,
    },
}
# Transformers has DeepSeek's class for Kimi.
CLASSES = {"kimi_k2": "deepseek_v3"}


def written(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json that transformers writes for it."""
    import transformers

    family = config["model_type"]
    known = transformers.AutoConfig.for_model(**config | {"model_type": CLASSES.get(family, family)})
    return json.loads(json.dumps(known.to_dict())) | {"model_type": family}


@pytest.mark.parametrize("name", HUB)
def test_a_config_means_what_transformers_reads(name):
    """Silent keys, old spellings and patterns of layers: transformers writes them all out, and the engines go by it."""
    config = SMALL | HUB[name]
    assert shape_of(config) == shape_of(written(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    """A key that config.json leaves out has the family's value, not a Llama's."""
    heads = {"num_key_value_heads": SMALL["num_attention_heads"]}
    needed = {
        "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 24},
        "mixtral": {"num_local_experts": 4},
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
        **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe_lite"), heads),
    }
    config = {"model_type": family} | SMALL
    del config["num_key_value_heads"]
    config |= needed.get(family, {})
    assert shape_of(config) == shape_of(written(config))


@pytest.mark.parametrize("name", HUB)
def test_a_shape_survives_the_way_to_the_engines(name):
    """Engines compute the same plan from it: a list in the place of a tuple is another shape."""
    shape = shape_of(SMALL | HUB[name])
    assert ModelShape.from_dict(json.loads(json.dumps(asdict(shape)))) == shape
    assert hash(ModelShape.from_dict(asdict(shape))) == hash(shape)


def test_both_spellings_of_rope_are_read():
    """transformers 5 moved rope_theta into rope_parameters: a missed base trains a model with other positions."""
    old = shape_of(QWEN2)
    new = {k: v for k, v in QWEN2.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}
    }
    assert old == shape_of(new)
    assert old.ropes == (Rope(theta=1e6),) * 8


def test_layers_differ_where_the_family_says_so():
    """By hand, for the two families with different layers: every sixth layer of Gemma 3, every fourth of OLMo 3."""
    gemma = shape_of(HUB["gemma 3 1B"] | SMALL)
    assert gemma.windows == (512,) * 5 + (None,) + (512,) * 2
    assert [rope.theta for rope in gemma.ropes] == [1e4] * 5 + [1e6] + [1e4] * 2
    olmo = shape_of(HUB["olmo 3 7B"] | SMALL)
    assert olmo.windows == ((4096,) * 3 + (None,)) * 2
    assert olmo.ropes[0] == Rope(theta=5e5)
    assert olmo.ropes[3].scaling == "yarn"
    assert shape_of(HUB["qwen2 with windows"] | SMALL).windows == (None,) * 5 + (1024,) * 3


def test_experts_are_where_the_config_says():
    """Every second layer, but not layer 3."""
    experts = shape_of(HUB["qwen3 30B-A3B"] | SMALL).experts
    assert experts == Experts(count=16, top_k=4, ffn=24, normalised=True, dense_layers=(0, 2, 3, 4, 6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v2"}, "supported families: llama, mistral, mixtral, qwen2, qwen3, "),
        (
            {"model_type": "gpt_oss", "swiglu_limit": 5.0},
            "swiglu_limit=5, swiglu_alpha=1.702 .vLLM computes with 7 and",
        ),
        (
            {"model_type": "gpt_oss", "attention_bias": False},
            "attention_bias=false .vLLM's attention always has biases",
        ),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            r"quantization_config \(MXFP4 weights are not trained; write a bfloat16 copy .*Mxfp4Config\(dequantize=True\)",
        ),
        ({"model_type": "gemma3"}, "it has an image encoder; give the text model alone, model_type 'gemma3_text'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "RoPE scaling 'dynamic'"),
        ({"rope_scaling": {"type": "llama3", "factor": 4}}, "RoPE scaling 'llama3' without low_freq_factor, high_fr"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 4}, r"layer_types \(layers of this family attend"),
        ({"layer_types": ["chunked_attention"] * 8}, "layer_types chunked_attention"),
        ({"model_type": "olmo3", "layer_types": ["full_attention"] * 7}, "7 layer_types for num_hidden_layers=8"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window=null with layers of sliding attention"),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1},
            "num_experts_per_tok=1 with weights that add up to 1",
        ),
        (DEEPSEEK_V3 | {"num_key_value_heads": 2}, r"num_key_value_heads=2 \(expected 4\)"),
        (DEEPSEEK_V3 | {"rope_interleave": False}, r"rope_interleave=False \(expected True\)"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, r"scoring_func='softmax' \(expected 'sigmoid'\)"),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, r"moe_layer_freq=2 \(expected 1\)"),
        (DEEPSEEK_V3 | {"attention_bias": True}, "attention_bias=true"),
        (DEEPSEEK_V3 | {"topk_group": 2}, "num_experts_per_tok=8 of topk_group=2 groups"),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": 63}, r"qk_rope_head_dim=63 \(expected an even number\)"),
        (DEEPSEEK_V3 | {"v_head_dim": 200}, "v_head_dim=200 above qk_nope_head_dim"),
        (DEEPSEEK_V3 | {"rope_scaling": {"type": "linear", "factor": 4}}, "RoPE scaling 'linear'"),
        (DEEPSEEK_V3 | {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.7}}, "one of mscale and mscale_all_"),
        (DEEPSEEK_V3 | {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": False}}, "truncate=False"),
        (
            HUB["glm 4.7 flash"] | {"first_k_dense_replace": 2, "mlp_layer_types": ["dense"] + ["sparse"] * 7},
            "with 1 d",
        ),
        (HUB["glm 4.7 flash"] | {"mlp_layer_types": ["sparse"] * 7 + ["dense"]}, "with dense layers behind others"),
        ({"model_type": "qwen3_moe"}, "config.json of a qwen3_moe model lacks num_experts"),
        (
            {"hidden_size": "64", "vocab_size": 0},
            r"has hidden_size='64' \(expected a whole number above 0\), vocab_size=0 ",
        ),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights='other.safetensors'"),
    ],
)
def test_what_cannot_be_built_exactly_is_refused(change, words):
    """A silently different model learns something else."""
    with pytest.raises(ValueError, match=words):
        shape_of(QWEN2 | {"sliding_window": 4} | change)


@pytest.mark.parametrize(
    ("family", "field", "value", "expected"),
    [
        ("llama", "rms_norm_eps", None, "a number above 0"),
        ("llama", "rms_norm_eps", "1e-6", "a number above 0"),
        ("llama", "tie_word_embeddings", "false", "true or false"),
        ("llama", "tie_word_embeddings", None, "true or false"),
        ("llama", "max_position_embeddings", None, "a whole number above 0"),
        ("llama", "max_position_embeddings", 256.0, "a whole number above 0"),
        ("llama", "num_key_value_heads", "2", "a whole number above 0"),
        ("llama", "head_dim", 16.0, "a whole number above 0"),
        ("llama", "num_hidden_layers", True, "a whole number above 0"),
        ("llama", "layer_types", 5, "a list"),
        ("mistral", "sliding_window", "16", "a whole number above 0"),
        ("mistral", "sliding_window", [16, None], "a whole number above 0"),
        ("gemma3_text", "sliding_window", 5.0, "a whole number above 0"),
        ("gemma3_text", "sliding_window_pattern", 0, "a whole number above 0"),
        ("gemma2", "query_pre_attn_scalar", None, "a whole number above 0"),
        ("gemma2", "attn_logit_softcapping", 0, "a number above 0"),
        ("qwen2", "use_sliding_window", "false", "true or false"),
        ("qwen3_moe", "norm_topk_prob", "true", "true or false"),
        ("qwen3_moe", "num_experts_per_tok", None, "a whole number above 0"),
        ("qwen3_moe", "mlp_only_layers", 1, "a list"),
        ("seed_oss", "attention_bias", None, "true or false"),
    ],
)
def test_a_value_of_another_type_is_refused_where_transformers_refuses_it(family, field, value, expected):
    """Else it is a traceback here, or the engine ends with one after all checks have passed."""
    config = (
        SMALL | {"model_type": family} | ({"num_experts": 4, "moe_intermediate_size": 24} if "moe" in family else {})
    )
    assert shape_of(config)
    words = re.escape(f"config.json of a {family} model has {field}={value!r} (expected {expected})")
    with pytest.raises(ValueError, match=words):
        shape_of(config | {field: value})
    with pytest.raises(Exception):  # noqa: B017 - of many classes
        transformers.AutoConfig.for_model(**config | {field: value})


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("mistral", "sliding_window", 0),
        ("mistral", "sliding_window", -1),
        ("llama", "head_dim", -1),
        ("llama", "rms_norm_eps", -1e-6),
        ("qwen3_moe", "num_experts_per_tok", 0),
        ("qwen3_moe", "decoder_sparse_step", 0),
    ],
)
def test_a_number_with_which_nothing_can_be_computed_is_refused(family, field, value):
    """transformers reads these, and fails or divides by zero in the model."""
    config = (
        SMALL | {"model_type": family} | ({"num_experts": 4, "moe_intermediate_size": 24} if "moe" in family else {})
    )
    with pytest.raises(ValueError, match=f"{field}={value} .expected a (whole )?number above 0"):
        shape_of(config | {field: value})


def test_two_numbers_of_experts_are_refused():
    """transformers goes by another name in each family: num_experts in Qwen3-Next, num_local_experts in GLM, the alias in Mixtral."""
    both = {"num_experts": 4, "num_local_experts": 8, "moe_intermediate_size": 24}
    for family in ("mixtral", "qwen3_moe", "qwen3_next", "gpt_oss"):
        with pytest.raises(ValueError, match="num_experts=4 and num_local_experts=8; expected one number of experts"):
            shape_of(SMALL | {"model_type": family} | both)
    with pytest.raises(ValueError, match="num_local_experts=8 and n_routed_experts=16"):
        shape_of(SMALL | DEEPSEEK_V3 | {"n_routed_experts": 16, "num_local_experts": 8})
    assert shape_of(SMALL | {"model_type": "mixtral"} | both | {"num_experts": 8}).experts.count == 8


def test_all_reasons_come_at_once():
    """One reason a start wastes a start each."""
    with pytest.raises(ValueError, match=r"mlp_bias.*quantization_config.*RoPE scaling"):
        shape_of(QWEN2 | {"mlp_bias": True, "quantization_config": {"bits": 4}, "rope_scaling": {"type": "longrope"}})


def test_missing_folder_is_named(tmp_path):
    """The most frequent mistake of all."""
    with pytest.raises(ValueError, match=r"nowhere is not a folder"):
        read_hf_config(tmp_path / "nowhere")
