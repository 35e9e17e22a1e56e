"""Megatron-core's names: of a router's settings, and of each parameter of `table` in its own checkpoints, by tensor and rows.

Megatron-core gives a tensor the same name in every layout and counts its elements over the whole model. It has three
ways to name those of a layer:
    by model    `decoder.layers.mlp.linear_fc2.weight [layers, hidden, ffn]`, if all layers are alike
    by layer    `decoder.layers.3.mlp.linear_fc2.weight [hidden, ffn]`
    by matrix   the same with the gate and up projections in `linear_fc1.weight_w` and `weight_v`, and with a tensor for
                each expert, `decoder.layers.3.mlp.experts.experts.5.linear_fc2.weight` (its singleton_local_shards)
In the first two, a layer's experts are in one tensor `[..., experts, rows, columns]`. In all of them each part of a delta
net's projection and convolution is a separate tensor, `in_proj.weight.query`. Pure: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.models.shape import DeltaNet, Experts, ModelShape
from mgrpo.models.table import FUSED_NORMS

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
VOCABULARY = (EMBEDDING, HEAD)
"""Parameters whose number of rows depends on how far a vocabulary was padded."""
OTHER_STATE = re.compile(r"(chained_\d+\.)?optimizer\.")
"""The beginning of the names of an optimizer's tensors."""

_NAMES: dict[str, tuple[str, ...]] = {
    **{own: (fused, own) for fused, own in FUSED_NORMS.items()},
    "self_attention.q_layernorm.weight": (
        "self_attention.q_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    "self_attention.kv_layernorm.weight": (
        "self_attention.kv_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    "self_attn_bda.norm.weight": ("self_attn_bda.norm.weight", "self_attention.linear_proj.post_layernorm.weight"),
    "mlp_bda.norm.weight": ("mlp_bda.norm.weight", "mlp.linear_fc2.post_layernorm.weight"),
    "self_attention.core_attention.sinks": ("self_attention.core_attention.softmax_offset",),
    **{
        f"mlp.experts.{name}": (f"mlp.experts.experts.{name}",)
        for name in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")
    },
}
"""Names of a layer's parameters in checkpoints, where they are not those of the table.

A norm is named by the layer it is computed with, which Megatron-core's own layers and Transformer Engine's decide
differently in an MoE layer. Norms of outputs are Megatron-Bridge's.
"""
_CONVOLUTION = "self_attention.conv1d.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MODULE = re.compile(r"\.weight\.\w+$|\.\w+$")
"""The end of a tensor's name, behind that of its module."""


@dataclass(frozen=True, slots=True)
class Slab:
    """Rows of a parameter at one place of a tensor: `tensor[at]`."""

    tensor: str
    at: Shape
    """Leading indices: layer, expert."""
    of: Shape
    """The number of each of them."""
    first_row: int
    """First row in the parameter."""
    shape: Shape
    is_convolution: bool = False
    """The tensor has a dimension of length 1 behind that of the rows."""

    @property
    def whole(self) -> Shape:
        """Shape of the tensor."""
        return (*self.of, *self._full(self.shape, 1))

    def box(self, start: Shape, shape: Shape) -> Box:
        """Slice of the tensor, where `start` counts from the slab's first row."""
        return Box(self.tensor, (*self.at, *self._full(start, 0)), (*(1 for _ in self.at), *self._full(shape, 1)))

    def _full(self, numbers: Shape, inserted: int) -> Shape:
        return (numbers[0], inserted, *numbers[1:]) if self.is_convolution else numbers

    @property
    def extra_state(self) -> Iterator[str]:
        """Names of the extra-state objects of the modules with these rows; Megatron-core requests them when it loads."""
        module = _MODULE.sub("", self.tensor)
        own = f"/shard_{_joined(self.at or (0,))}_{_joined(self.of or (1,))}"
        yield f"{module}._extra_state{own}"
        attention, _, layer = module.rpartition(".")
        if layer in ("linear_qkv", "linear_kv_up_proj"):
            yield f"{attention}.core_attention._extra_state{own}"


def router_settings(experts: Experts) -> dict[str, Any]:
    """Megatron's settings of MoE layers and their router, as its configuration and its checkpoints name them."""
    has_groups = experts.groups > 1
    return {
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.top_k,
        # Softmax over all experts, with the chosen weights normalised to 1, equals softmax over the chosen ones.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalised,
        "moe_router_score_function": experts.score,
        "moe_router_num_groups": experts.groups if has_groups else None,
        "moe_router_group_topk": experts.top_groups if has_groups else None,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1 else None,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
    }


def stored_names(model: ModelShape, name: str, shape: Shape) -> list[list[Slab]]:
    """The slabs of a parameter as we write it, under every name that a Megatron has for it: all hold the same."""
    return _slabs(model, name, shape, [_by_model if is_homogeneous(model) else _by_layer])


def possible_names(model: ModelShape, name: str, shape: Shape) -> list[list[Slab]]:
    """The slabs of a parameter in every form that a Megatron writes it."""
    return _slabs(model, name, shape, [_by_model, _by_layer, _by_matrix])


def is_homogeneous(model: ModelShape) -> bool:
    """True if checkpoints are written by model; Megatron-core names MoE and hybrid layers by layer unless configured otherwise."""
    return model.experts is None and model.delta is None


_Place = Callable[[ModelShape, int, str, Shape], list[Slab]]
"""Name from a layer, a name in it and the parameter's shape."""


def _slabs(model: ModelShape, name: str, shape: Shape, places: Sequence[_Place]) -> list[list[Slab]]:
    found = _LAYER.fullmatch(name)
    if found is None:
        return [[Slab(name, (), (), 0, shape)]]
    layer, own = int(found[1]), found[2]
    if model.delta and (parts := _delta_parts(model.delta).get(own)):
        return [_one_below_the_other(model, layer, own, parts, shape, place) for place in places]
    names = _NAMES.get(own, (own,))
    if own == "input_layernorm.weight" and not model.has_attention(layer):
        names = ("self_attention.in_proj.layer_norm_weight", own)
    return [place(model, layer, known, shape) for known in names for place in places]


def _delta_parts(delta: DeltaNet) -> dict[str, dict[str, int]]:
    """Parameters of a delta net that are stored as one tensor per part: the parts' names and numbers of rows."""
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    mixed = {"query": keys, "key": keys, "value": values}
    return {
        "self_attention.in_proj.weight": mixed | {"z": values, "beta": delta.value_heads, "alpha": delta.value_heads},
        _CONVOLUTION: mixed,
    }


def _one_below_the_other(
    model: ModelShape, layer: int, name: str, parts: dict[str, int], shape: Shape, place: _Place
) -> list[Slab]:
    slabs, first_row = [], 0
    for part, rows in parts.items():
        for slab in place(model, layer, f"{name}.{part}", (rows, *shape[1:])):
            slabs.append(replace(slab, first_row=first_row, is_convolution=name == _CONVOLUTION))
        first_row += rows
    return slabs


def _by_model(model: ModelShape, layer: int, name: str, shape: Shape) -> list[Slab]:
    tensor, experts = f"decoder.layers.{name}", _experts(model, layer, name)
    if not experts:
        return [Slab(tensor, (layer,), (model.num_layers,), 0, shape)]
    of, own = (model.num_layers, experts), (shape[0] // experts, *shape[1:])
    return [Slab(tensor, (layer, number), of, number * own[0], own) for number in range(experts)]


def _by_layer(model: ModelShape, layer: int, name: str, shape: Shape) -> list[Slab]:
    tensor, experts = f"decoder.layers.{layer}.{name}", _experts(model, layer, name)
    if not experts:
        return [Slab(tensor, (), (), 0, shape)]
    own = (shape[0] // experts, *shape[1:])
    return [Slab(tensor, (number,), (experts,), number * own[0], own) for number in range(experts)]


def _by_matrix(model: ModelShape, layer: int, name: str, shape: Shape) -> list[Slab]:
    tensor, experts = f"decoder.layers.{layer}.{name}", _experts(model, layer, name)
    tensors = [tensor]
    if experts:
        before, _, matrix = tensor.rpartition(".experts.")
        tensors = [f"{before}.experts.{number}.{matrix}" for number in range(experts)]
    if name.endswith(("linear_fc1.weight", "linear_fc1.bias")):
        tensors = [half for whole in tensors for half in (f"{whole}_w", f"{whole}_v")]
    own = (shape[0] // len(tensors), *shape[1:])
    return [Slab(tensor, (), (), number * own[0], own) for number, tensor in enumerate(tensors)]


def _experts(model: ModelShape, layer: int, name: str) -> int:
    """Number of experts that the parameter holds one above the other; 0 where it holds none."""
    experts = model.experts_of(layer)
    return experts.count if experts and ".experts." in name else 0


def _joined(numbers: Shape) -> str:
    return ".".join(map(str, numbers))
