"""Megatron-core's names: of the settings of a router, and of each parameter of `table` in its own checkpoints, in which tensors, at which rows.

Megatron-core gives a tensor the same name in every layout and counts its elements over the whole model. It has three
ways to name those of a layer:
    by model    `decoder.layers.mlp.linear_fc2.weight [layers, hidden, ffn]`, if all layers are alike
    by layer    `decoder.layers.3.mlp.linear_fc2.weight [hidden, ffn]`
    by matrix   the same with the gate and up projections in `linear_fc1.weight_w` and `weight_v`, and with a tensor for
                each expert, `decoder.layers.3.mlp.experts.experts.5.linear_fc2.weight` (its singleton_local_shards)
In the first two, a layer's experts are in one tensor `[..., experts, rows, columns]`. Pure: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mgrpo.models.placement.boxes import Shape
from mgrpo.models.shape import Experts, ModelShape
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
    "mlp.experts.linear_fc1.weight": ("mlp.experts.experts.linear_fc1.weight",),
    "mlp.experts.linear_fc2.weight": ("mlp.experts.experts.linear_fc2.weight",),
}
"""Names of a layer's parameters in checkpoints, where they are not those of the table.

A norm is named by the layer it is computed with, which Megatron-core's own layers and Transformer Engine's decide
differently in a mixture of experts. Norms of outputs are Megatron-Bridge's.
"""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Slab:
    """Rows of a parameter that lie at one place of a tensor: `tensor[at]`."""

    tensor: str
    at: Shape
    """Leading indices: layer, expert."""
    of: Shape
    """The number of each of them."""
    first_row: int
    """In the parameter."""
    shape: Shape

    @property
    def whole(self) -> Shape:
        """Shape of the tensor."""
        return (*self.of, *self.shape)

    @property
    def extra_state(self) -> Iterator[str]:
        """Names of the objects that modules keep beside these rows; Megatron-core asks for them when it loads."""
        module = self.tensor.rpartition(".")[0]
        own = f"/shard_{_joined(self.at or (0,))}_{_joined(self.of or (1,))}"
        yield f"{module}._extra_state{own}"
        attention, _, layer = module.rpartition(".")
        if layer in ("linear_qkv", "linear_kv_up_proj"):
            yield f"{attention}.core_attention._extra_state{own}"


def router_settings(experts: Experts) -> dict[str, Any]:
    """Megatron's settings of a mixture and its router, as its configuration and its checkpoints name them."""
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
    found = _LAYER.fullmatch(name)
    if found is None:
        return [[Slab(name, (), (), 0, shape)]]
    place = _by_model if is_homogeneous(model) else _by_layer
    return [place(model, int(found[1]), known, shape) for known in _NAMES.get(found[2], (found[2],))]


def possible_names(model: ModelShape, name: str, shape: Shape) -> list[list[Slab]]:
    """The slabs of a parameter in every form that a Megatron writes it."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return [[Slab(name, (), (), 0, shape)]]
    names = _NAMES.get(found[2], (found[2],))
    return [
        place(model, int(found[1]), known, shape) for known in names for place in (_by_model, _by_layer, _by_matrix)
    ]


def problem(model: ModelShape) -> str | None:
    """Why Megatron-core's checkpoints have no place for the model's parameters."""
    if model.experts and model.experts.names == "gpt_oss":
        return (
            "Megatron's checkpoints keep the experts of gpt-oss transposed and with gate above up, which is not written or "
            "read here; use our own format (--format safetensors) or the Hugging Face folder"
        )
    if model.delta:
        return (
            "Megatron's checkpoints keep the parts of a gated delta net's projection and convolution in tensors of their own, which "
            "are not written or read here; use our own format (--format safetensors) or the Hugging Face folder"
        )
    return None


def is_homogeneous(model: ModelShape) -> bool:
    """Whether checkpoints are written by model; Megatron-core names a mixture of experts by layer unless told otherwise."""
    return model.experts is None


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
    if name.endswith("linear_fc1.weight"):
        tensors = [half for whole in tensors for half in (f"{whole}_w", f"{whole}_v")]
    own = (shape[0] // len(tensors), *shape[1:])
    return [Slab(tensor, (), (), number * own[0], own) for number, tensor in enumerate(tensors)]


def _experts(model: ModelShape, layer: int, name: str) -> int:
    """Number of experts that the parameter holds one above the other; 0 where it holds none."""
    experts = model.experts_of(layer)
    return experts.count if experts and ".experts." in name else 0


def _joined(numbers: Shape) -> str:
    return ".".join(map(str, numbers))
