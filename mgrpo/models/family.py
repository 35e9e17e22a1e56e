"""The shape of a model, read from a Hugging Face config.json, for the families that can be built exactly.

What cannot be built exactly is refused with its reason: a silently different model is worse than an error.

A family is one entry of `FAMILIES`: the defaults of transformers, and a small function from the config to those fields
of `ModelShape` in which the family differs from a Llama. New tensor names go into `table`, new modules into
`policy.layers.architecture`; `tests/unit/models/test_checkpoints.py` and `tests/ranks/test_families.py` compare the result with
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from mgrpo.models.hf_config import HfConfig
from mgrpo.models.rope import latent_rope_problems, read_rope, rope_parameters, rope_problems, score_factor
from mgrpo.models.shape import DeltaNet, Experts, LatentAttention, ModelShape

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of one `model_type` of transformers from a Llama."""

    fields: Callable[[HfConfig], dict[str, Any]] = lambda hf: {}
    """Fields of `ModelShape`."""
    layer_types: Callable[[HfConfig], Sequence[str]] = lambda hf: [FULL] * hf["num_hidden_layers"]
    """Whether each layer attends to everything or to a window, or has a delta net."""
    defaults: HfConfig = field(default_factory=dict)
    """Transformers' defaults for keys that config.json lacks."""
    windowed_rope: Callable[[HfConfig], HfConfig] | None = None
    """RoPE of layers with a window, where config.json has one record for all layers; None: the same."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Key and value in config.json; the engines support no other value."""
    default_rope: HfConfig | None = None
    """Transformers' RoPE where config.json has no record; None: unscaled."""
    rotates_part: bool = False
    """Whether transformers reads `partial_rotary_factor` in this family."""
    biased_attention: Literal["refused", "qkv", "all"] = "refused"
    """What has a bias where config.json says `attention_bias`: queries, keys and values, or the output projection as well."""


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
    """As listed in config.json; else one layer in `period` attends to everything."""
    layers = range(hf["num_hidden_layers"])
    return hf.get("layer_types") or [SLIDING if (layer + 1) % period else FULL for layer in layers]


def _hybrid_layer_types(hf: HfConfig) -> Sequence[str]:
    """As listed in config.json; else one layer in four attends and the others have delta nets."""
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
    return {"delta": delta, "gated_attention": True, "qk_norm": "head", "zero_centred_norms": True}


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
    """Of GLM and DeepSeek; the first `dense` layers have a plain MLP."""
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
    return _latent(hf) | {"experts": _sigmoid_experts(hf, dense=dense) if has_experts else None}


def _glm4_moe_lite(hf: HfConfig) -> dict[str, Any]:
    kinds = hf.get("mlp_layer_types") or ["dense"]
    return _deepseek({**hf, "first_k_dense_replace": kinds.count("dense")})


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
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
GLM_LITE = {
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
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
MXFP4_COPY = (
    "MXFP4 weights are not trained; write a bfloat16 copy with transformers, AutoModelForCausalLM.from_pretrained(NAME, "
    "dtype='bfloat16', quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(FOLDER), and give that folder"
)
VLLM_CLAMP = (7.0, 1.702)
NOT_BUILT = {"gemma3": "it has an image encoder; give the text model alone, model_type 'gemma3_text'"}


def shape_of(hf: HfConfig) -> ModelShape:
    """The model's shape; one ValueError names every reason why it cannot be built exactly."""
    name = hf.get("model_type")
    if name not in FAMILIES:
        reason = f": {NOT_BUILT[name]}" if name in NOT_BUILT else ""
        raise ValueError(f"model_type={name!r} is not supported{reason}; supported families: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    hf = {**family.defaults, **hf}
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in needed if key not in hf]
    if missing:
        raise ValueError(f"config.json of a {name} model lacks {', '.join(missing)}")
    wrong = [f"{key}={hf[key]!r}" for key in needed if not isinstance(hf[key], int) or hf[key] < 1]
    if wrong:
        raise ValueError(f"config.json of a {name} model has {', '.join(wrong)}; expected whole numbers above 0")
    try:
        fields, layer_types = family.fields(hf), family.layer_types(hf)
    except KeyError as err:
        raise ValueError(f"config.json of a {name} model lacks {err.args[0]}") from err
    ropes = {kind: _rope_parameters(hf, kind, family) for kind in dict.fromkeys(layer_types)}
    refused = list(_problems(hf, family, fields, layer_types, ropes))
    if refused:
        raise ValueError(f"this {name} model cannot be built exactly: {'; '.join(refused)}")
    heads, max_positions = hf["num_attention_heads"], hf.get("max_position_embeddings", 2048)
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    read = {kind: read_rope(parameters, max_positions=max_positions) for kind, parameters in ropes.items()}
    common = {
        "num_layers": hf["num_hidden_layers"],
        "hidden": hf["hidden_size"],
        "heads": heads,
        "kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "ffn": hf["intermediate_size"],
        "vocab": hf["vocab_size"],
        "max_positions": max_positions,
        "tied": bool(hf.get("tie_word_embeddings", False)),
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "ropes": tuple(read[kind] for kind in layer_types),
        "windows": _windows(hf, layer_types),
        "attention_scale": head_dim**-0.5,
    }
    return ModelShape(family=name, **common | fields)


def _windows(hf: HfConfig, layer_types: Sequence[str]) -> tuple[int | None, ...]:
    return tuple(hf.get("sliding_window") if kind == SLIDING else None for kind in layer_types)


def _rope_parameters(hf: HfConfig, layer_type: str, family: Family) -> dict[str, Any]:
    is_listed = layer_type in (hf.get("rope_parameters") or {})
    if layer_type == SLIDING and family.windowed_rope is not None and not is_listed:
        return dict(family.windowed_rope(hf))
    if family.default_rope and not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        return rope_parameters({**hf, "rope_parameters": family.default_rope})
    return rope_parameters(hf, layer_type)


def _problems(
    hf: HfConfig,
    family: Family,
    fields: Mapping[str, Any],
    layer_types: Sequence[str],
    ropes: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    key, expected = family.activation
    if hf.get(key, expected) != expected:
        yield f"{key}={hf[key]!r} (expected {expected!r})"
    if hf.get("mlp_bias"):
        yield "mlp_bias=true"
    if hf.get("attention_bias") and family.biased_attention == "refused":
        yield "attention_bias=true (its output projection has a bias)"
    if family.biased_attention == "all" and not hf.get("attention_bias"):
        yield "attention_bias=false (vLLM's attention always has biases in this family)"
    if hf.get("use_bidirectional_attention"):
        yield "use_bidirectional_attention=true"
    if hf.get("attn_logit_softcapping") and "attention_softcap" not in fields:
        yield "attn_logit_softcapping (transformers and vLLM do not apply it in this family)"
    if quantization := hf.get("quantization_config"):
        is_mxfp4 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
        yield f"quantization_config ({MXFP4_COPY if is_mxfp4 else 'export the weights unquantised'})"
    if latent := fields.get("latent"):
        yield from _latent_problems(hf, latent, ropes.values())
    experts = fields.get("experts")
    if experts:
        yield from _router_problems(experts)
    if experts and experts.clamp and (experts.clamp, hf["swiglu_alpha"]) != VLLM_CLAMP:
        limit, alpha = VLLM_CLAMP
        yield (
            f"swiglu_limit={experts.clamp:g}, swiglu_alpha={hf['swiglu_alpha']} (vLLM computes with {limit:g} and {alpha} whatever "
            "config.json says)"
        )
    delta = fields.get("delta")
    if delta and delta.value_heads % delta.key_heads:
        yield f"linear_num_value_heads={delta.value_heads} is no multiple of linear_num_key_heads={delta.key_heads}"
    if experts and experts.top_k == 1 and experts.normalised and experts.score == "softmax":
        yield "num_experts_per_tok=1 with weights that add up to 1 (the router would have no gradient)"
    known = {FULL, LINEAR if delta else SLIDING}
    unknown = sorted({*layer_types, *(hf.get("layer_types") or ())} - known)
    if unknown:
        yield f"layer_types {', '.join(unknown)} (expected {' or '.join(sorted(known))})"
    elif len(layer_types) != hf["num_hidden_layers"]:
        yield f"{len(layer_types)} layer_types for num_hidden_layers={hf['num_hidden_layers']}"
    elif _windows(hf, hf.get("layer_types") or layer_types) != _windows(hf, layer_types):
        yield "layer_types (layers of this family attend alike)"
    shares = dict.fromkeys(float(parameters.get("partial_rotary_factor") or 1.0) for parameters in ropes.values())
    if not family.rotates_part:
        yield from (f"partial_rotary_factor={share:g}" for share in shares if share != 1.0)
    yield from dict.fromkeys(problem for parameters in ropes.values() for problem in rope_problems(parameters))


def _latent_problems(hf: HfConfig, latent: LatentAttention, ropes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What transformers or vLLM computes otherwise, or does not read at all."""
    heads, kinds = hf["num_attention_heads"], hf.get("mlp_layer_types") or []
    for key, expected in (
        ("num_key_value_heads", heads),
        ("rope_interleave", True),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        if hf.get(key, expected) != expected:
            yield f"{key}={hf[key]!r} (expected {expected!r})"
    if latent.rope_dim % 2:
        yield f"qk_rope_head_dim={latent.rope_dim} (expected an even number)"
    if latent.v_dim > latent.nope_dim + latent.rope_dim:
        yield f"v_head_dim={latent.v_dim} above qk_nope_head_dim + qk_rope_head_dim={latent.nope_dim + latent.rope_dim}"
    dense = kinds.count("dense")
    if "dense" in kinds[dense:]:
        yield "mlp_layer_types with dense layers behind others (vLLM takes the first ones for dense)"
    if kinds and hf.get("first_k_dense_replace", dense) != dense:
        yield f"first_k_dense_replace={hf['first_k_dense_replace']} with {dense} dense layers in mlp_layer_types"
    for parameters in ropes:
        yield from latent_rope_problems(parameters)


def _router_problems(experts: Experts) -> Iterator[str]:
    """Megatron's router differs from transformers' there."""
    if experts.score == "sigmoid" and not experts.normalised:
        yield "norm_topk_prob=false with sigmoid scores (Megatron makes the weights of the chosen experts add up to 1)"
    if experts.score == "sigmoid" and experts.top_k == 1:
        yield "num_experts_per_tok=1 with sigmoid scores (Megatron does not normalise a single weight)"
    if experts.groups > 1 and experts.top_k // experts.top_groups != 2:
        yield (
            f"num_experts_per_tok={experts.top_k} of topk_group={experts.top_groups} groups (Megatron scores a group by its best "
            f"{experts.top_k // experts.top_groups} experts, transformers by its best 2)"
        )
