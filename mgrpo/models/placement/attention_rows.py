"""The part of the table of a layer's attention, or of what stands in its place."""

from __future__ import annotations

from mgrpo.models.placement.boxes import Shape
from mgrpo.models.placement.layout_rules import Grouped, Replicated, Rule, Split
from mgrpo.models.shape import ModelShape


def attention_tensors(model: ModelShape, layer: int, at: str) -> dict[str, Shape]:
    """Name and shape of the HF tensors; `at` is the layer's prefix, like "model.layers.3."."""
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

    def qkv(kind: str) -> Grouped:
        return Grouped(tuple(f"{at}self_attn.{name}_proj.{kind}" for name in "qkv"), model.kv_heads)

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
