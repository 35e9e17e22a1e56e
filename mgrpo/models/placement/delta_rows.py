"""The part of the table of a gated delta net, which stands in the place of attention."""

from __future__ import annotations

from mgrpo.models.placement.boxes import Shape
from mgrpo.models.placement.layout_rules import Replicated, Rows, Rule, Sections, Split
from mgrpo.models.shape import DeltaNet


def delta_tensors(delta: DeltaNet, hidden: int, at: str) -> dict[str, Shape]:
    """Name and shape of the HF tensors; `at` is their prefix, like "model.layers.3.linear_attn."."""
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    if delta.names == "by_head":
        rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * delta.value_heads}
    else:
        rows = {"qkv": 2 * keys + values, "z": values, "b": delta.value_heads, "a": delta.value_heads}
    return {
        **{f"{at}in_proj_{name}.weight": (count, hidden) for name, count in rows.items()},
        at + "conv1d.weight": (2 * keys + values, 1, delta.conv),
        at + "A_log": (delta.value_heads,),
        at + "dt_bias": (delta.value_heads,),
        at + "norm.weight": (delta.value_dim,),
        at + "out_proj.weight": (hidden, values),
    }


def delta_rules(delta: DeltaNet, at: str) -> dict[str, Rule]:
    """Our parameters, named and laid out as Megatron-core's own module has them, and their rules."""
    inputs = _inputs_by_head(delta, at) if delta.names == "by_head" else _inputs_apart(delta, at)
    return {
        "self_attention.in_proj.weight": Sections(inputs),
        "self_attention.conv1d.weight": query_key_value(delta, at + "conv1d.weight"),
        "self_attention.A_log": Split(at + "A_log"),
        "self_attention.dt_bias": Split(at + "dt_bias"),
        "self_attention.out_norm.weight": Replicated(at + "norm.weight"),
        "self_attention.out_proj.weight": Split(at + "out_proj.weight", dim=1),
    }


def query_key_value(delta: DeltaNet, name: str) -> Sections:
    """Rule of a tensor with the rows of all queries, all keys and all values: each rank has those of its own heads."""
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    return Sections(((Rows(name, 0, keys),), (Rows(name, keys, keys),), (Rows(name, 2 * keys, values),)))


def _inputs_apart(delta: DeltaNet, at: str) -> tuple[tuple[Rows, ...], ...]:
    """Queries, keys, values, z, b and a, from a tensor of the first three and one of each other."""
    counts = {"z": delta.value_heads * delta.value_dim, "b": delta.value_heads, "a": delta.value_heads}
    others = tuple((Rows(f"{at}in_proj_{name}.weight", 0, count),) for name, count in counts.items())
    return query_key_value(delta, at + "in_proj_qkv.weight").sections + others


def _inputs_by_head(delta: DeltaNet, at: str) -> tuple[tuple[Rows, ...], ...]:
    """The same from two tensors, in which all rows of a key head and its value heads are contiguous."""
    values = delta.value_heads // delta.key_heads
    parts = {
        "qkvz": (delta.key_dim, delta.key_dim, values * delta.value_dim, values * delta.value_dim),
        "ba": (values, values),
    }
    sections: list[tuple[Rows, ...]] = []
    for name, counts in parts.items():
        for part, count in enumerate(counts):
            before, width = sum(counts[:part]), sum(counts)
            tensor = f"{at}in_proj_{name}.weight"
            sections.append(tuple(Rows(tensor, head * width + before, count) for head in range(delta.key_heads)))
    return tuple(sections)
