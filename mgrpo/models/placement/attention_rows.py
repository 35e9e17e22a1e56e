"""Table part of a layer's attention, or of the delta net in its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mgrpo.models.placement.boxes import Shape
from mgrpo.models.placement.delta_rows import delta_rules, delta_tensors
from mgrpo.models.placement.layout_rules import Replicated, Rows, Rule, Sections, Split
from mgrpo.models.shape import LatentAttention, ModelShape

_OF_LATENT: dict[str, tuple[str, Callable[[str], Rule]]] = {
    "q_proj": ("linear_q_proj", Split),
    "q_a_proj": ("linear_q_down_proj", Replicated),
    "q_a_layernorm": ("q_layernorm", Replicated),
    "q_b_proj": ("linear_q_up_proj", Split),
    "kv_a_proj_with_mqa": ("linear_kv_down_proj", Replicated),
    "kv_a_layernorm": ("kv_layernorm", Replicated),
    "kv_b_proj": ("linear_kv_up_proj", Split),
    "o_proj": ("linear_proj", partial(Split, dim=1)),
}
"""Latent attention: Megatron's name and the rule of each weight. Rows of split weights are head after head."""


def attention_tensors(model: ModelShape, layer: int, at: str) -> dict[str, Shape]:
    """Name and shape of the HF tensors; `at` is the layer's prefix, like "model.layers.3."."""
    if model.latent:
        return {f"{at}self_attn.{name}.weight": shape for name, shape in _latent_shapes(model, model.latent).items()}
    if model.delta and not model.has_attention(layer):
        return delta_tensors(model.delta, model.hidden, at + "linear_attn.")
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    rows = {"q": query * (2 if model.gated_attention else 1), "k": key, "v": key}
    tensors: dict[str, Shape] = {}
    for name, count in rows.items():
        tensors[at + f"self_attn.{name}_proj.weight"] = (count, model.hidden)
        if model.qkv_bias:
            tensors[at + f"self_attn.{name}_proj.bias"] = (count,)
        if model.qk_norm and name != "v":
            tensors[at + f"self_attn.{name}_norm.weight"] = (count if model.qk_norm == "whole" else model.head_dim,)
    tensors[at + "self_attn.o_proj.weight"] = (model.hidden, query)
    if model.out_bias:
        tensors[at + "self_attn.o_proj.bias"] = (model.hidden,)
    if model.sinks:
        tensors[at + "self_attn.sinks"] = (model.heads,)
    return tensors


def attention_rules(model: ModelShape, layer: int, at: str) -> dict[str, Rule]:
    """Megatron's parameters and their rules."""
    if model.latent:
        return {
            f"self_attention.{_OF_LATENT[name][0]}.weight": _OF_LATENT[name][1](f"{at}self_attn.{name}.weight")
            for name in _latent_shapes(model, model.latent)
        }
    if model.delta and not model.has_attention(layer):
        return delta_rules(model.delta, at + "linear_attn.")

    def qkv(kind: str) -> Sections:
        return _query_key_value(model, *(f"{at}self_attn.{name}_proj.{kind}" for name in "qkv"))

    rules: dict[str, Rule] = {
        "self_attention.linear_qkv.weight": qkv("weight"),
        "self_attention.linear_proj.weight": Split(at + "self_attn.o_proj.weight", dim=1),
    }
    if model.qkv_bias:
        rules["self_attention.linear_qkv.bias"] = qkv("bias")
    if model.out_bias:
        rules["self_attention.linear_proj.bias"] = Replicated(at + "self_attn.o_proj.bias")
    if model.sinks:
        rules["self_attention.core_attention.sinks"] = Split(at + "self_attn.sinks")
    if model.qk_norm:
        rule = Split if model.qk_norm == "whole" else Replicated
        rules["self_attention.q_layernorm.weight"] = rule(at + "self_attn.q_norm.weight")
        rules["self_attention.k_layernorm.weight"] = rule(at + "self_attn.k_norm.weight")
    return rules


def _latent_shapes(model: ModelShape, latent: LatentAttention) -> dict[str, Shape]:
    """Each weight of latent attention. A head's rows of kv_b_proj are its key, without the rotated part, and its value."""
    queries = model.heads * model.head_dim
    query: dict[str, Shape] = {"q_proj": (queries, model.hidden)}
    if latent.q_rank is not None:
        query = {
            "q_a_proj": (latent.q_rank, model.hidden),
            "q_a_layernorm": (latent.q_rank,),
            "q_b_proj": (queries, latent.q_rank),
        }
    return query | {
        "kv_a_proj_with_mqa": (latent.kv_rank + latent.rope_dim, model.hidden),
        "kv_a_layernorm": (latent.kv_rank,),
        "kv_b_proj": (model.heads * (latent.nope_dim + latent.v_dim), latent.kv_rank),
        "o_proj": (model.hidden, model.heads * latent.v_dim),
    }


def _query_key_value(model: ModelShape, query: str, key: str, value: str) -> Sections:
    """Group after group of queries, their gates if there are any, key and value.

    One section: a rank's run of rows cuts a group in two where there are fewer groups than ranks.
    """
    dim, heads = model.head_dim, model.heads // model.kv_heads
    rows: list[Rows] = []
    for group in range(model.kv_heads):
        first = group * heads
        if model.gated_attention:
            # The checkpoint has the gate of each head behind its query.
            places = [(2 * head + part) * dim for part in (0, 1) for head in range(first, first + heads)]
            rows += [Rows(query, place, dim) for place in places]
        else:
            rows.append(Rows(query, first * dim, heads * dim))
        rows += [Rows(name, group * dim, dim) for name in (key, value)]
    return Sections((tuple(rows),))
