"""The families that can be built: their differences from a Llama, and the defaults of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from mgrpo.models.hf_config import HfConfig
from mgrpo.models.rope import FULL, SLIDING, rope_parameters, score_factor
from mgrpo.models.shape import DeltaNet, Experts, LatentAttention

LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of one `model_type` of transformers from a Llama."""

    fields: Callable[[HfConfig], dict[str, Any]] = lambda hf: {}
    """Fields of `ModelShape`."""
    layer_types: Callable[[HfConfig], Sequence[str]] = lambda hf: [FULL] * hf["num_hidden_layers"]
    """Kind of each layer: full attention, a sliding window, or a delta net."""
    defaults: HfConfig = field(default_factory=dict)
    """Transformers' defaults for keys that config.json lacks."""
    windowed_rope: Callable[[HfConfig], HfConfig] | None = None
    """RoPE of layers with a window, where config.json has one record for all layers; None: the same."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Key and value in config.json; the engines support no other value."""
    default_rope: HfConfig | None = None
    """Transformers' RoPE where config.json has no record; None: unscaled."""
    rotates_part: bool = False
    """True if transformers reads `partial_rotary_factor` in this family."""
    biased_attention: Literal["refused", "qkv", "all"] = "refused"
    """Projections with a bias when config.json sets `attention_bias`: queries, keys and values, or the output projection as well."""


def _all_sliding(hf: HfConfig) -> list[str]:
    return [SLIDING] * hf["num_hidden_layers"]


def _qwen_layer_types(hf: HfConfig) -> Sequence[str]:
    """Only the later layers have a window."""
    layers = range(hf["num_hidden_layers"])
    if not hf.get("use_sliding_window"):
        return [FULL] * len(layers)
    return hf.get("layer_types") or [SLIDING if layer >= hf["max_window_layers"] else FULL for layer in layers]


def _qwen_moe_layer_types(hf: HfConfig) -> list[str]:
    return [SLIDING if hf.get("use_sliding_window") else FULL] * hf["num_hidden_layers"]


def _every(period: int, hf: HfConfig) -> Sequence[str]:
    """Layer types listed in config.json; else full attention in one layer of `period`."""
    layers = range(hf["num_hidden_layers"])
    return hf.get("layer_types") or [SLIDING if (layer + 1) % period else FULL for layer in layers]


def _hybrid_layer_types(hf: HfConfig) -> Sequence[str]:
    """Layer types listed in config.json; else attention in one layer of four, and delta nets in the others."""
    period, layers = hf.get("full_attention_interval", 4), range(hf["num_hidden_layers"])
    return hf.get("layer_types") or [LINEAR if (layer + 1) % period else FULL for layer in layers]


def _hybrid(hf: HfConfig, names: Literal["by_head", "apart"]) -> dict[str, Any]:
    """Qwen's models of gated delta nets and gated attention."""
    delta = DeltaNet(
        layers=tuple(layer for layer, kind in enumerate(_hybrid_layer_types(hf)) if kind == LINEAR),
        key_heads=hf["linear_num_key_heads"],
        value_heads=hf["linear_num_value_heads"],
        key_dim=hf["linear_key_head_dim"],
        value_dim=hf["linear_value_head_dim"],
        conv=hf["linear_conv_kernel_dim"],
        names=names,
    )
    return {
        "delta": delta,
        "gated_attention": True,
        "qk_norm": "head",
        "zero_centred_norms": True,
        "draft_layers": hf.get("mtp_num_hidden_layers", 1),
    }


def _qwen3_moe(hf: HfConfig) -> dict[str, Any]:
    step, dense = hf["decoder_sparse_step"], hf.get("mlp_only_layers") or ()
    experts = Experts(
        count=hf.get("num_local_experts") or hf["num_experts"],
        top_k=hf["num_experts_per_tok"],
        ffn=hf["moe_intermediate_size"],
        normalised=hf["norm_topk_prob"],
        dense_layers=tuple(layer for layer in range(hf["num_hidden_layers"]) if layer in dense or (layer + 1) % step),
    )
    return {"qk_norm": "head", "experts": experts}


def _qwen3_next(hf: HfConfig) -> dict[str, Any]:
    experts = replace(_qwen3_moe(hf)["experts"], shared_ffn=hf["shared_expert_intermediate_size"], shared_gate=True)
    return {
        **_hybrid(hf, "by_head"),
        "experts": experts if len(experts.dense_layers) < hf["num_hidden_layers"] else None,
    }


def _qwen3_5_moe(hf: HfConfig) -> dict[str, Any]:
    return {**_qwen3_next(hf), **_hybrid(hf, "apart")}


def _sigmoid_experts(hf: HfConfig, *, dense: int) -> Experts:
    """Experts of GLM and DeepSeek; the first `dense` layers have a plain MLP."""
    return Experts(
        count=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        ffn=hf["moe_intermediate_size"],
        normalised=hf["norm_topk_prob"],
        dense_layers=tuple(range(dense)),
        score="sigmoid",
        choice_bias=True,
        groups=hf["n_group"],
        top_groups=hf["topk_group"],
        scale=hf["routed_scaling_factor"],
        shared_ffn=hf["moe_intermediate_size"] * hf["n_shared_experts"],
    )


def _glm4_moe(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": bool(hf["attention_bias"]),
        "qk_norm": "head" if hf["use_qk_norm"] else None,
        "experts": _sigmoid_experts(hf, dense=hf["first_k_dense_replace"]),
        "draft_layers": hf["num_nextn_predict_layers"],
    }


def _latent(hf: HfConfig) -> dict[str, Any]:
    heads, nope_dim, rope_dim = hf["num_attention_heads"], hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    return {
        "kv_heads": heads,
        "head_dim": nope_dim + rope_dim,
        "attention_scale": (nope_dim + rope_dim) ** -0.5 * score_factor(rope_parameters(hf)),
        "latent": LatentAttention(
            q_rank=hf["q_lora_rank"],
            kv_rank=hf["kv_lora_rank"],
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            v_dim=hf["v_head_dim"],
        ),
    }


def _deepseek(hf: HfConfig) -> dict[str, Any]:
    dense = hf["first_k_dense_replace"]
    has_experts = dense < hf["num_hidden_layers"]
    experts = _sigmoid_experts(hf, dense=dense) if has_experts else None
    return _latent(hf) | {"experts": experts, "draft_layers": hf["num_nextn_predict_layers"]}


def _glm4_moe_lite(hf: HfConfig) -> dict[str, Any]:
    kinds = hf.get("mlp_layer_types") or ["dense"]
    return _deepseek({**hf, "first_k_dense_replace": kinds.count("dense")})


def _seed_oss(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": hf["attention_bias"], "out_bias": hf["attention_out_bias"]}


def _mixtral(hf: HfConfig) -> dict[str, Any]:
    experts = Experts(
        count=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        ffn=hf["intermediate_size"],
        normalised=True,
        names="block_sparse_moe",
    )
    return {"experts": experts}


def _gpt_oss(hf: HfConfig) -> dict[str, Any]:
    experts = Experts(
        count=hf.get("num_experts") or hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        ffn=hf["intermediate_size"],
        normalised=True,
        names="gpt_oss",
        biases=True,
        clamp=float(hf["swiglu_limit"]),
    )
    return {"qkv_bias": True, "out_bias": True, "sinks": True, "experts": experts}


def _olmo(hf: HfConfig) -> dict[str, Any]:
    return {"norms": "after", "qk_norm": "whole"}


def _gemma(hf: HfConfig) -> dict[str, Any]:
    return {
        "norms": "around",
        "zero_centred_norms": True,
        "attention_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "logit_softcap": hf.get("final_logit_softcapping"),
        "embedding_scale": hf["hidden_size"] ** 0.5,
        "activation": "gelu_pytorch_tanh",
    }


def _gemma2(hf: HfConfig) -> dict[str, Any]:
    return {**_gemma(hf), "attention_softcap": hf["attn_logit_softcapping"]}


def _gemma3(hf: HfConfig) -> dict[str, Any]:
    return {**_gemma(hf), "qk_norm": "head"}


QWEN = {"sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32_768}
HYBRID = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32_768,
}
HYBRID_MOE = {
    **HYBRID,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
GLM = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
DEEPSEEK = {
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
GLM_LITE = {
    **DEEPSEEK,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 1.8,
}
GPT_OSS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
SEED = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "attention_bias": True,
    "attention_out_bias": False,
}
OLMO = {"rms_norm_eps": 1e-5}
GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GELU = ("hidden_activation", "gelu_pytorch_tanh")
FAMILIES = {
    "llama": Family(),
    "mistral": Family(layer_types=_all_sliding, defaults={**MISTRAL, "sliding_window": 4096}),
    "mixtral": Family(
        _mixtral,
        _all_sliding,
        {**MISTRAL, "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
    ),
    "qwen2": Family(lambda hf: {"qkv_bias": True}, _qwen_layer_types, {**QWEN, "num_key_value_heads": 32}),
    "qwen3": Family(
        lambda hf: {"qk_norm": "head"}, _qwen_layer_types, {**QWEN, "num_key_value_heads": 32, "head_dim": 128}
    ),
    "qwen3_moe": Family(
        _qwen3_moe,
        _qwen_moe_layer_types,
        {**QWEN, "num_key_value_heads": 4, "decoder_sparse_step": 1, "norm_topk_prob": False, "num_experts_per_tok": 8},
    ),
    "qwen3_next": Family(
        _qwen3_next,
        _hybrid_layer_types,
        {**HYBRID_MOE, "intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10},
        rotates_part=True,
    ),
    "qwen3_5_text": Family(
        lambda hf: _hybrid(hf, "apart"), _hybrid_layer_types, {**HYBRID, "num_key_value_heads": 4}, rotates_part=True
    ),
    "qwen3_5_moe_text": Family(
        _qwen3_5_moe,
        _hybrid_layer_types,
        # No layer has a plain MLP.
        {**HYBRID_MOE, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8},
        rotates_part=True,
    ),
    "glm4_moe": Family(
        _glm4_moe,
        defaults=GLM,
        rotates_part=True,
        biased_attention="qkv",
    ),
    "glm4_moe_lite": Family(_glm4_moe_lite, defaults=GLM_LITE),
    "deepseek_v3": Family(_deepseek, defaults=DEEPSEEK),
    "kimi_k2": Family(_deepseek, defaults=DEEPSEEK),
    "seed_oss": Family(_seed_oss, defaults=SEED, biased_attention="qkv"),
    "olmo2": Family(_olmo, defaults=OLMO),
    "olmo3": Family(
        _olmo,
        partial(_every, 4),
        {**OLMO, "rope_theta": 500_000.0, "sliding_window": 4096},
        windowed_rope=lambda hf: {"rope_theta": 500_000.0},
    ),
    "gemma2": Family(
        _gemma2,
        partial(_every, 2),
        {
            **GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        activation=GELU,
    ),
    "gpt_oss": Family(_gpt_oss, partial(_every, 2), GPT_OSS, biased_attention="all", default_rope=GPT_OSS_ROPE),
    "gemma3_text": Family(
        _gemma3,
        lambda hf: _every(hf.get("sliding_window_pattern", 6), hf),
        {**GEMMA, "max_position_embeddings": 131_072, "rope_theta": 1e6},
        windowed_rope=lambda hf: {"rope_theta": hf.get("rope_local_base_freq", 10_000.0)},
        activation=GELU,
    ),
}
NOT_BUILT = {
    name: f"it has an image encoder; give the text model alone, model_type '{name}_text', which docs/models.md says how to write"
    for name in ("gemma3", "qwen3_5", "qwen3_5_moe")
}
