"""The part of the table of a layer's attention, or of what stands in its place."""

from __future__ import annotations

from mgrpo.models.placement.boxes import Shape
from mgrpo.models.placement.delta_rows import delta_rules, delta_tensors
from mgrpo.models.placement.layout_rules import Replicated, Rows, Rule, Sections, Split
from mgrpo.models.shape import ModelShape


def attention_tensors(model: ModelShape, layer: int, at: str) -> dict[str, Shape]:
    """Name and shape of the HF tensors; `at` is the layer's prefix, like "model.layers.3."."""
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
    return tensors


def attention_rules(model: ModelShape, layer: int, at: str) -> dict[str, Rule]:
    """Megatron's parameters and their rules."""
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
    if model.qk_norm:
        rule = Split if model.qk_norm == "whole" else Replicated
        rules["self_attention.q_layernorm.weight"] = rule(at + "self_attn.q_norm.weight")
        rules["self_attention.k_layernorm.weight"] = rule(at + "self_attn.k_norm.weight")
    return rules


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
