"""The shape of a model of one of the families in the catalogue, from its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mgrpo.models.family.catalogue import FAMILIES, NOT_BUILT, Family
from mgrpo.models.family.refusals import problems, windows
from mgrpo.models.hf_config import HfConfig
from mgrpo.models.rope import FULL, SLIDING, is_positive, read_rope, rope_parameters
from mgrpo.models.shape import ModelShape

NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
USUAL: Mapping[str, Any] = {
    **dict.fromkeys((*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings"), 1),
    **dict.fromkeys(("sliding_window_pattern", "full_attention_interval"), 1),
    "rms_norm_eps": 1.0,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), False),
    **dict.fromkeys(("layer_types", "mlp_layer_types", "mlp_only_layers"), ()),
}
"""A value of the right type for fields of all families, as `Family.defaults` has them for one."""
NULL_IS_OFF = frozenset(
    [
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "q_lora_rank",
        "partial_rotary_factor",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "layer_types",
        "mlp_layer_types",
        "mlp_only_layers",
    ]
)
MAY_BE_ZERO = frozenset(("first_k_dense_replace", "num_nextn_predict_layers", "max_window_layers", "n_shared_experts"))
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of one number, of which transformers prefers another one in each family."""


def shape_of(hf: HfConfig) -> ModelShape:
    """The model's shape; one ValueError names every reason why it cannot be built exactly."""
    name = hf.get("model_type")
    if name not in FAMILIES:
        reason = f": {NOT_BUILT[name]}" if name in NOT_BUILT else ""
        raise ValueError(f"model_type={name!r} is not supported{reason}; supported families: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    counts = [f"{key}={hf[key]!r}" for key in EXPERT_COUNTS if hf.get(key) is not None]
    if (
        any(key in family.defaults for key in ("num_experts_per_tok", *EXPERT_COUNTS))
        and len({count.partition("=")[2] for count in counts}) > 1
    ):
        raise ValueError(f"config.json of a {name} model has {' and '.join(counts)}; expected one number of experts")
    hf = {**family.defaults, **hf}
    missing = [key for key in NEEDED if key not in hf]
    if missing:
        raise ValueError(f"config.json of a {name} model lacks {', '.join(missing)}")
    if wrong := [*_wrong_values(hf, {**USUAL, **family.defaults})]:
        raise ValueError(f"config.json of a {name} model has {', '.join(wrong)}")
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(hf.get(key) or {}, Mapping):
            raise ValueError(f"config.json of a {name} model has {key}={hf[key]!r}; expected an object")
    try:
        fields, layer_types = family.fields(hf), family.layer_types(hf)
    except KeyError as err:
        raise ValueError(f"config.json of a {name} model lacks {err.args[0]}") from err
    ropes = {kind: _rope_parameters(hf, kind, family) for kind in dict.fromkeys(layer_types)}
    refused = list(problems(name, hf, family, fields, layer_types, ropes))
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
        "windows": windows(hf, layer_types),
        "attention_scale": head_dim**-0.5,
    }
    return ModelShape(family=name, **common | fields)


def _wrong_values(hf: HfConfig, usual: HfConfig) -> Iterator[str]:
    """Fields with a value of another type or range than `usual`, which transformers' own class refuses or cannot compute with."""
    for key, known in usual.items():
        value = hf.get(key, known)
        if value is None and key in NULL_IS_OFF:
            continue
        if isinstance(known, bool):
            fits, expected = isinstance(value, bool), "true or false"
        elif isinstance(known, tuple):
            fits, expected = isinstance(value, (list, tuple)), "a list"
        elif isinstance(known, float):
            fits, expected = is_positive(value), "a number above 0"
        elif key in MAY_BE_ZERO:
            fits, expected = type(value) is int and value >= 0, "a whole number, 0 or more"
        else:
            fits, expected = type(value) is int and value > 0, "a whole number above 0"
        if not fits:
            yield f"{key}={value!r:.80} (expected {expected})"


def _rope_parameters(hf: HfConfig, layer_type: str, family: Family) -> dict[str, Any]:
    new = hf.get("rope_parameters")
    if family.windowed_rope is not None and layer_type == SLIDING:
        return {**family.windowed_rope(hf), **((new or {}).get(SLIDING) or {})}
    if family.windowed_rope is not None and not (new or {}).get(FULL):
        # transformers lays `rope_scaling` over this record, whose rope_type comes before the older key `type`.
        return {"rope_type": "default", **rope_parameters({**hf, "rope_parameters": None})}
    if family.default_rope and new is None and not hf.get("rope_scaling"):
        return rope_parameters({**hf, "rope_parameters": family.default_rope})
    return rope_parameters(hf, layer_type)
