"""Rotary position embeddings as a Hugging Face config.json describes them. Pure: the angles are computed in policy/.

Two forms are read: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`, which is one record for the
whole model or one for each type of layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

SCALINGS = ("default", "linear", "llama3", "yarn")
FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers that may have separate RoPE records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Frequencies `theta ** (-2 i / head_dim)`, some of them divided by `factor` to make room for more positions.

    linear divides all. llama3 and yarn divide those that turn less than `slow` times within `original_positions`, keep
    those that turn more than `fast` times, and blend in between: llama3 by the number of turns, yarn by the index i.
    """

    theta: float
    share: float = 1.0
    """Share of a head's dimensions that is rotated, the first ones; the rest are left as they are."""
    scaling: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_positions: int = 0
    slow: float = 0.0
    fast: float = 0.0
    whole_indices: bool = True
    """yarn: the blend begins and ends at whole indices."""
    attention_factor: float = 1.0
    """yarn: rotated dimensions of queries and keys are multiplied by this."""


def rope_parameters(hf: Mapping[str, Any], layer_type: str | None = None) -> dict[str, Any]:
    """The record for layers of this type, from either form, `rope_theta` included.

    Where config.json has both forms, transformers' rule holds: a `rope_scaling` that is not empty takes the place of a flat
    `rope_parameters` with its theta, and is laid over the full-attention record of one with a record for each type of layer.
    """
    new, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    own = (new[layer_type] or {}) | (scaling if layer_type == FULL else {}) if layer_type in new else scaling or new
    common = {
        "rope_theta": hf.get("rope_theta", 10_000.0),
        "partial_rotary_factor": hf.get("partial_rotary_factor"),
    }
    return common | own


def record_problems(hf: Mapping[str, Any], used: Iterable[Mapping[str, Any]], *, by_layer_type: bool) -> Iterator[str]:
    """Reasons why transformers cannot read the RoPE of a config.json, or reads another than the engines.

    Args:
        used: the records that were read.
        by_layer_type: transformers has a record for each type of layer in this family.
    """
    new, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling")
    nested, scaled = (
        [key for key, record in found.items() if isinstance(record, Mapping)] for found in (new, scaling or {})
    )
    if scaled:
        yield f"rope_scaling with records of their own for {', '.join(scaled)} (transformers reads such records in rope_parameters alone)"
    if nested and not by_layer_type:
        yield f"rope_parameters with records of their own for {', '.join(nested)} (transformers reads one for all layers)"
    if new and by_layer_type and not nested:
        yield f"rope_parameters with one record for all layers (transformers reads one for {FULL} and one for {SLIDING})"
    if by_layer_type and scaling is not None and hf.get("rope_parameters") is not None and FULL not in nested:
        yield f"rope_scaling beside rope_parameters without {FULL} (transformers cannot read it)"
    elsewhere = hf.get("original_max_position_embeddings")
    for record in used:
        inside = record.get("original_max_position_embeddings")
        if _scaling(record) in ("llama3", "yarn") and elsewhere is not None and elsewhere != inside:
            yield f"original_max_position_embeddings={elsewhere} beside {inside} in the record of RoPE (keep the one in the record)"


def table_positions(hf: Mapping[str, Any]) -> int | None:
    """Positions for which an engine has angles, if that is not the model's `max_position_embeddings`; None: no such table.

    vLLM's table for yarn has the scaled number of original positions, and reads beyond its end raise no error.
    """
    kinds = [kind for kind, record in (hf.get("rope_parameters") or {}).items() if isinstance(record, Mapping)]
    records = [rope_parameters(hf, kind) for kind in kinds or [None]]
    ends = [
        int(float(record["factor"]) * int(record["original_max_position_embeddings"]))
        for record in records
        if _scaling(record) == "yarn" and record.get("factor") and record.get("original_max_position_embeddings")
    ]
    return min(ends, default=None)


def rope_problems(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Reasons why these embeddings cannot be built exactly."""
    scaling = _scaling(parameters)
    if not parameters.get("rope_type", scaling):
        yield f"RoPE of rope_type {parameters['rope_type']!r} (expected one of {', '.join(SCALINGS)})"
    if parameters.get("type", scaling) != scaling:
        yield f"RoPE of rope_type {scaling!r} and type {parameters['type']!r} (vLLM refuses two)"
    if scaling not in SCALINGS:
        yield f"RoPE scaling {scaling!r} (expected one of {', '.join(SCALINGS)})"
        return
    needed = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "linear": ("factor",), "yarn": ("factor",)}
    missing = [key for key in needed.get(scaling, ()) if parameters.get(key) is None]
    if missing:
        yield f"RoPE scaling {scaling!r} without {', '.join(missing)}"
    read = ["rope_theta", *needed.get(scaling, ())]
    if scaling in ("llama3", "yarn") and "original_max_position_embeddings" in parameters:
        read.append("original_max_position_embeddings")
    if wrong := [
        f"{key}={parameters[key]!r}" for key in read if key not in missing and not is_positive(parameters[key])
    ]:
        yield f"RoPE with {', '.join(wrong)} (expected numbers above 0)"


def is_positive(value: Any) -> bool:
    """True for a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def read_rope(parameters: Mapping[str, Any], *, max_positions: int) -> Rope:
    """The embeddings of a record that has no `rope_problems`."""
    scaling, theta = _scaling(parameters), float(parameters["rope_theta"])
    share = float(parameters.get("partial_rotary_factor") or 1.0)
    if scaling == "default":
        return Rope(theta=theta, share=share)
    factor = float(parameters["factor"])
    if scaling == "linear":
        return Rope(theta=theta, share=share, scaling="linear", factor=factor)
    original = int(parameters.get("original_max_position_embeddings") or max_positions)
    if scaling == "llama3":
        return Rope(
            theta=theta,
            share=share,
            scaling="llama3",
            factor=factor,
            original_positions=original,
            slow=float(parameters["low_freq_factor"]),
            fast=float(parameters["high_freq_factor"]),
        )
    return Rope(
        theta=theta,
        share=share,
        scaling="yarn",
        factor=factor,
        original_positions=original,
        slow=float(parameters.get("beta_slow") or 1),
        fast=float(parameters.get("beta_fast") or 32),
        whole_indices=bool(parameters.get("truncate", True)),
        attention_factor=_attention_factor(parameters, factor),
    )


def score_factor(parameters: Mapping[str, Any]) -> float:
    """Factor of latent attention's scores: yarn's temperature for the whole of a head, of which only a part is rotated."""
    if _scaling(parameters) != "yarn" or not parameters.get("mscale_all_dim"):
        return 1.0
    return _temperature(float(parameters.get("factor") or 1.0), parameters["mscale_all_dim"]) ** 2


def latent_rope_problems(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Differences between the rotations of transformers and vLLM in latent attention, where vLLM takes every scaling for its own yarn."""
    scaling = _scaling(parameters)
    if scaling not in ("default", "yarn"):
        yield f"RoPE scaling {scaling!r} (expected default or yarn with latent attention)"
        return
    if bool(parameters.get("mscale")) != bool(parameters.get("mscale_all_dim")):
        yield "one of mscale and mscale_all_dim without the other (transformers ignores it, vLLM does not)"
    for key, default in (("attention_factor", None), ("truncate", True)):
        if parameters.get(key, default) != default:
            yield f"{key}={parameters[key]!r} (vLLM ignores it with latent attention)"


def _scaling(parameters: Mapping[str, Any]) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """yarn's temperature, as given or as its paper recommends (arXiv:2309.00071, section 3.4)."""

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return _temperature(factor, parameters["mscale"]) / _temperature(factor, parameters["mscale_all_dim"])
    return _temperature(factor)


def _temperature(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
