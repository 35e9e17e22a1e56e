"""The shape of a model, read from a Hugging Face config.json, for the families we can build exactly.

What cannot be built exactly is refused with its reason: a silently different model is worse than an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3's RoPE scaling; Megatron fixes the other numbers of the formula."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What Megatron, the rule table and the engines need to know of a dense decoder."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool


FAMILIES = ("llama", "qwen2", "qwen3")


def read_hf_config(model_dir: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face checkpoint folder; a ValueError names what is missing."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model_name_or_path={model_dir!s} has no config.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as err:
        raise ValueError(f"{path} is not valid JSON: {err}") from err


def shape_of(hf: dict[str, Any]) -> ModelShape:
    """The model's shape; every reason why it cannot be built exactly goes into one ValueError."""
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r} is not supported; supported families: {', '.join(FAMILIES)}")
    missing = [
        key
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        if key not in hf
    ]
    if missing:
        raise ValueError(f"config.json of a {family} model lacks {', '.join(missing)}")
    refused = []
    if hf.get("hidden_act", "silu") != "silu":
        refused.append(f"hidden_act={hf['hidden_act']!r} (expected 'silu')")
    if hf.get("mlp_bias"):
        refused.append("mlp_bias=true")
    if hf.get("attention_bias"):
        refused.append("attention_bias=true (its output projection has a bias)")
    if hf.get("use_sliding_window"):
        refused.append("use_sliding_window=true")
    if hf.get("quantization_config"):
        refused.append("quantization_config (export the weights unquantised)")
    theta, scaling, problem = _rope(hf)
    if problem:
        refused.append(problem)
    if refused:
        raise ValueError(f"this {family} model cannot be built exactly: {'; '.join(refused)}")
    heads = hf["num_attention_heads"]
    return ModelShape(
        family=family,
        num_layers=hf["num_hidden_layers"],
        hidden=hf["hidden_size"],
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        ffn=hf["intermediate_size"],
        vocab=hf["vocab_size"],
        max_positions=hf.get("max_position_embeddings", 2048),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _rope(hf: dict[str, Any]) -> tuple[float, Llama3Rope | None, str]:
    """Base and scaling, from either spelling: `rope_theta` + `rope_scaling`, or transformers 5's `rope_parameters`."""
    rope = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        return theta, None, f"partial_rotary_factor={rope['partial_rotary_factor']}"
    if kind == "default":
        return theta, None, ""
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(rope.get(key) == value for key, value in fixed.items()):
        return theta, Llama3Rope(factor=float(rope["factor"])), ""
    return theta, None, f"RoPE scaling {rope} (expected none, or llama3 with {fixed})"
