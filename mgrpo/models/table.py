"""The slices of Hugging Face tensors that each shard of the model holds, in training and in the engines.

One table and the rules of `layout_rules` map a Megatron parameter to HF tensors. Loading, exporting, the
weight-sync plan and the layout-free part of a checkpoint read `local_parameters`; nothing else describes a layout. Pure:
no torch, no processes.
"""

from __future__ import annotations

import re
from dataclasses import replace

from mgrpo.layout import VOCAB_MULTIPLE, InferLayout, Layout
from mgrpo.models.placement.attention_rows import attention_rules, attention_tensors
from mgrpo.models.placement.boxes import Box, LocalParameter, Shape
from mgrpo.models.placement.delta_rows import query_key_value
from mgrpo.models.placement.layout_rules import Replicated, Rule, Split
from mgrpo.models.placement.mlp_rows import FUSED_EXPERTS, expert_rules, is_frozen, mlp_rules, mlp_tensors
from mgrpo.models.shape import ModelShape

NORMS = {
    "before": {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"},
    "after": {"post_attention_layernorm": "self_attn_bda.norm", "post_feedforward_layernorm": "mlp_bda.norm"},
    "around": {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "self_attn_bda.norm",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "mlp_bda.norm",
    },
}
"""The norms of a layer for each `ModelShape.norms`: their names in HF and in Megatron."""

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's names of norms that it computes with the matrix product after them, and Megatron's own."""
_ROPE_TABLES = re.compile(r"\.rotary_emb(_local)?\.(\w*inv_freq|cos_cached|sin_cached)$")


def hf_tensors(model: ModelShape) -> dict[str, Shape]:
    """Name and shape of every tensor of the HF checkpoint. A tied model has no lm_head."""
    tensors: dict[str, Shape] = {model.prefix + "embed_tokens.weight": (model.vocab, model.hidden)}
    for layer in range(model.num_layers):
        at = f"{model.prefix}layers.{layer}."
        tensors |= attention_tensors(model, layer, at)
        tensors |= {f"{at}{name}.weight": (model.hidden,) for name in NORMS[model.norms]}
        tensors |= mlp_tensors(model, layer, at)
    tensors[model.prefix + "norm.weight"] = (model.hidden,)
    if not model.tied:
        tensors["lm_head.weight"] = (model.vocab, model.hidden)
    return tensors


def trained_tensors(model: ModelShape) -> dict[str, Shape]:
    """Tensors of `hf_tensors` that training changes."""
    return {name: shape for name, shape in hf_tensors(model).items() if not is_frozen(name)}


def is_draft(name: str, model: ModelShape) -> bool:
    """True if a tensor of a checkpoint belongs to `ModelShape.draft_layers`."""
    behind = (f"{model.prefix}layers.{model.num_layers + number}." for number in range(model.draft_layers))
    return name.startswith((*behind, "mtp.")) if model.draft_layers else False


def is_left_out(name: str, model: ModelShape) -> bool:
    """True for tensors that transformers and vLLM leave unread: drafting layers, and tables of RoPE in old checkpoints."""
    return is_draft(name, model) or name.startswith("mtp.") or bool(_ROPE_TABLES.search(name))


def _layer_rules(model: ModelShape, layer: int) -> dict[str, Rule]:
    """Megatron's parameters of one layer except its experts."""
    at = f"{model.prefix}layers.{layer}."
    norms: dict[str, Rule] = {
        f"{name}.weight": Replicated(f"{at}{hf_name}.weight") for hf_name, name in NORMS[model.norms].items()
    }
    return attention_rules(model, layer, at) | norms | mlp_rules(model, layer, at)


def _expert_rules(model: ModelShape, layer: int, layout: Layout, expert_rank: int) -> dict[str, Rule]:
    """The experts of one layer that a rank holds."""
    experts = model.experts_of(layer)
    if experts is None:
        return {}
    share = experts.count // layout.expert
    own = range(expert_rank * share, (expert_rank + 1) * share)
    return expert_rules(experts, own, f"{model.prefix}layers.{layer}.")


def local_parameters(
    model: ModelShape, layout: Layout, rank: int, tensors: dict[str, Shape] | None = None
) -> dict[str, LocalParameter]:
    """Every Megatron parameter that `rank` holds; layers are counted from 0 over the whole model.

    Args:
        tensors: `hf_tensors(model)`, for callers with many ranks.
    """
    place = layout.coordinate(rank)
    tensors = tensors or hf_tensors(model)
    parameters: dict[str, LocalParameter] = {}

    def add(name: str, rule: Rule) -> None:
        parameters[name] = rule.place(tensors, place.tensor, layout.tensor)

    if place.pipeline == 0:
        add("embedding.word_embeddings.weight", Split(model.prefix + "embed_tokens.weight", multiple=VOCAB_MULTIPLE))
    for chunk in range(layout.virtual_pipeline):
        for layer in layout.chunk_layers(model.num_layers, place.pipeline, chunk):
            at = f"decoder.layers.{layer}."
            for name, rule in _layer_rules(model, layer).items():
                add(at + name, rule)
            for name, rule in _expert_rules(model, layer, layout, place.expert).items():
                expert_tensor = place.tensor if layout.expert_tensor > 1 else 0
                parameters[at + name] = rule.place(tensors, expert_tensor, layout.expert_tensor)
    if place.pipeline == layout.pipeline - 1:
        add("decoder.final_layernorm.weight", Replicated(model.prefix + "norm.weight"))
        if not model.tied:
            add("output_layer.weight", Split("lm_head.weight", multiple=VOCAB_MULTIPLE))
        elif layout.pipeline > 1:
            add("output_layer.weight", Split(model.prefix + "embed_tokens.weight", multiple=VOCAB_MULTIPLE))
            parameters["output_layer.weight"] = replace(parameters["output_layer.weight"], is_copy=True)
    return parameters


def training_boxes(model: ModelShape, layout: Layout) -> list[list[Box]]:
    """Boxes that each training rank holds, in the order of its parameters and pieces."""
    return [
        [piece.box for parameter in local_parameters(model, layout, rank).values() for piece in parameter.pieces]
        for rank in range(layout.world_size)
    ]


ENGINE_VOCAB_MULTIPLE = 64
"""vLLM pads vocabularies up to a multiple of this."""
ROW_PARALLEL = frozenset(("o_proj", "out_proj", "down_proj", "w2"))
"""Matrices of which an engine's workers hold columns; of others they hold rows."""
WHOLE = frozenset(("gate", "router", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa"))
"""Modules that every worker holds whole, besides norms."""
SHARED_EXPERTS = ".shared_expert"
"""Part of the names of all tensors of the shared MLP, and of no other."""
EXPERTS = ".experts."
"""Part of the names of all tensors of experts, and of no other."""


def engine_boxes(model: ModelShape, layout: InferLayout) -> list[list[Box]]:
    """Boxes that each worker of one vLLM engine holds, in the order of the HF tensors."""
    tensors = hf_tensors(model)
    return [
        [box for name in tensors for box in worker_boxes(name, tensors, model, layout, worker)]
        for worker in range(layout.workers)
    ]


def worker_boxes(
    name: str, tensors: dict[str, Shape], model: ModelShape, layout: InferLayout, worker: int
) -> list[Box]:
    """Slices of one HF tensor that an engine's worker holds; equal for layers that are alike."""
    if layout.expert_parallel and model.experts and EXPERTS in name:
        return _whole_experts(name, tensors[name], layout.experts(worker, model.experts.count))
    # The workers of a copy of attention share out its tokens before the experts, but not in vLLM's GLM-4.5 and 4.7.
    is_alike = layout.data > 1 and not model.family.startswith("glm4_moe")
    place = (0, 1) if is_alike and SHARED_EXPERTS in name else (worker % layout.tensor, layout.tensor)
    return [piece.box for piece in _engine_parameter(name, tensors, model, *place).pieces]


def _whole_experts(name: str, shape: Shape, own: range) -> list[Box]:
    """Slices of a tensor for the experts `own`; it belongs to one expert, or to all of them along its first dimension."""
    number, rest = name.partition(EXPERTS)[2].split(".")[0], (0,) * (len(shape) - 1)
    if number.isdecimal():
        return [Box(name, (0, *rest), shape)] if int(number) in own else []
    return [Box(name, (own.start, *rest), (len(own), *shape[1:]))]


def _engine_parameter(
    name: str, tensors: dict[str, Shape], model: ModelShape, worker: int, workers: int
) -> LocalParameter:
    *_, kind, last = name.split(".")
    if kind == "experts":
        if (dim := FUSED_EXPERTS[last]) is not None:
            return Split(name, dim).place(tensors, worker, workers)
        # The other workers have zeros there.
        return Replicated(name).place(tensors, worker, workers) if worker == 0 else LocalParameter(tensors[name], ())
    if "norm" in kind or kind in WHOLE or (kind in ROW_PARALLEL and last == "bias"):
        return Replicated(name).place(tensors, worker, workers)
    if kind in ("embed_tokens", "lm_head"):
        return Split(name, multiple=ENGINE_VOCAB_MULTIPLE).place(tensors, worker, workers)
    if kind in ("k_proj", "v_proj") and model.kv_heads < workers:
        # With fewer key-value heads than workers, neighbours hold copies of one head.
        return Split(name).place(tensors, worker * model.kv_heads // workers, model.kv_heads)
    if kind in ("in_proj_qkv", "conv1d") and model.delta:
        return query_key_value(model.delta, name).place(tensors, worker, workers)
    return Split(name, dim=1 if kind in ROW_PARALLEL else 0).place(tensors, worker, workers)
