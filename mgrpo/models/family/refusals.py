"""Reasons why a model cannot be built exactly: a silently different model is worse than an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mgrpo.models.family.catalogue import LINEAR, Family
from mgrpo.models.family.engine_fields import engine_field_problems
from mgrpo.models.hf_config import HfConfig
from mgrpo.models.rope import FULL, SLIDING, latent_rope_problems, record_problems, rope_problems
from mgrpo.models.shape import Experts, LatentAttention

MXFP4_COPY = (
    "MXFP4 weights are not trained; write a bfloat16 copy with transformers, AutoModelForCausalLM.from_pretrained(NAME, "
    "dtype='bfloat16', quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(FOLDER), and give that folder"
)
VLLM_CLAMP = (7.0, 1.702)
"""The limit and the slope of clamped experts in vLLM."""


def windows(hf: HfConfig, layer_types: Sequence[str]) -> tuple[int | None, ...]:
    """See `ModelShape.windows`."""
    return tuple(hf.get("sliding_window") if kind == SLIDING else None for kind in layer_types)


def problems(
    name: str,
    hf: HfConfig,
    family: Family,
    fields: Mapping[str, Any],
    layer_types: Sequence[str],
    ropes: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """One for each reason.

    Args:
        name: the model_type.
        hf: with the family's defaults.
        fields: those of `Family.fields`.
        layer_types: of each layer.
        ropes: of each type of layer.
    """
    key, expected = family.activation
    if hf.get(key, expected) != expected:
        yield f"{key}={hf[key]!r} (expected {expected!r})"
    if hf.get("mlp_bias"):
        yield "mlp_bias=true"
    if fields.get("out_bias") and not fields.get("qkv_bias"):
        yield "attention_out_bias=true with attention_bias=false (Megatron gives queries, keys and values a bias with the output)"
    if hf.get("attention_bias") and family.biased_attention == "refused":
        yield "attention_bias=true (its output projection has a bias)"
    if family.biased_attention == "all" and not hf.get("attention_bias"):
        yield "attention_bias=false (vLLM's attention always has biases in this family)"
    if hf.get("transformers_weights"):
        yield f"transformers_weights={hf['transformers_weights']!r} (a file of weights that transformers alone reads; take it out)"
    if hf.get("use_bidirectional_attention"):
        yield "use_bidirectional_attention=true"
    if hf.get("attn_logit_softcapping") and "attention_softcap" not in fields:
        yield "attn_logit_softcapping (transformers and vLLM do not apply it in this family)"
    if (quantization := hf.get("quantization_config")) is not None:
        is_mxfp4 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
        yield f"quantization_config ({MXFP4_COPY if is_mxfp4 else 'export the weights unquantised'})"
    if latent := fields.get("latent"):
        yield from _latent_problems(hf, latent, fields.get("experts"), ropes.values())
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
    elif windows(hf, hf.get("layer_types") or layer_types) != windows(hf, layer_types):
        yield "layer_types (layers of this family attend alike)"
    elif {FULL, SLIDING} <= {*layer_types} and hf.get("sliding_window") is None:
        yield "sliding_window=null with layers of sliding attention (expected its width in tokens)"
    shares = dict.fromkeys(float(parameters.get("partial_rotary_factor") or 1.0) for parameters in ropes.values())
    if not family.rotates_part:
        yield from (f"partial_rotary_factor={share:g}" for share in shares if share != 1.0)
    yield from record_problems(hf, ropes.values(), by_layer_type=family.windowed_rope is not None)
    yield from dict.fromkeys(problem for parameters in ropes.values() for problem in rope_problems(parameters))
    yield from dict.fromkeys(engine_field_problems(name, hf, ropes.values()))


def _latent_problems(
    hf: HfConfig, latent: LatentAttention, experts: Experts | None, ropes: Iterable[Mapping[str, Any]]
) -> Iterator[str]:
    """Fields that transformers or vLLM computes otherwise, or ignores."""
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
    built = dense if kinds or experts is None else len(experts.dense_layers)
    if experts and hf.get("first_k_dense_replace", built) != built:
        yield (
            f"first_k_dense_replace={hf['first_k_dense_replace']} with {built} dense layers in mlp_layer_types (vLLM goes by the one, "
            "transformers by the other)"
        )
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
