"""The slices of Hugging Face tensors that each shard of the model holds, in training and in the engines.

One table (`_layer_rules`) and four rules define how a Megatron parameter is laid out in HF tensors:
    Replicated  every tensor rank holds the whole tensor
    Split       the tensor is cut along one dimension (rows of column-parallel layers and vocabularies, columns of
                row-parallel layers); the last rows of a padded vocabulary correspond to nothing
    Stacked     several tensors, each cut along the same dimension, one above the other (gate and up, experts)
    Grouped     query, key and value rows interleaved by key-value group, then cut along the rows
Loading, exporting, the weight-sync plan and the layout-free part of a checkpoint read `local_parameters`; nothing else
describes a layout. Pure: no torch, no processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mgrpo.layout import VOCAB_MULTIPLE, InferLayout, Layout
from mgrpo.models.family import ModelShape

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular slice of the HF tensor `name`."""

    name: str
    start: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    def intersect(self, other: Box) -> Box | None:
        """The common part of two slices of one tensor, or None."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = [min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Box(self.name, start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The place of this slice inside `outer`, which contains it."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, outer.start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box and the place in the local parameter where it lies (`local` starts a region of the box's shape)."""

    box: Box
    local: Shape

    @property
    def region(self) -> tuple[slice, ...]:
        """Index of the piece in the local parameter."""
        return tuple(slice(a, a + n) for a, n in zip(self.local, self.box.shape, strict=True))


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A box inside a run of a parameter's elements: `run[start : start + size].view(shape)[region]`."""

    box: Box
    start: int
    shape: Shape
    region: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One Megatron parameter on one rank. Rows that no piece covers are vocabulary padding."""

    shape: Shape
    pieces: tuple[Piece, ...]
    is_copy: bool = False
    """The LM head of a tied model's last stage, a copy of the first stage's embedding."""

    def run(self, start: int, stop: int) -> Iterator[FlatPiece]:
        """The pieces that elements `start` to `stop` hold, counted row by row: the shard of an optimizer that ignores rows.

        Each box lies in a partial first row, whole rows, or a partial last row.
        """
        width = self.shape[1] if len(self.shape) == 2 else 1
        first_whole, last_whole = -(-start // width), stop // width
        if first_whole > last_whole:
            cuts = [(start, stop)]
        else:
            cuts = [(start, first_whole * width), (first_whole * width, last_whole * width), (last_whole * width, stop)]
        for begin, end in cuts:
            if begin == end:
                continue
            rows = max((end - begin) // width, 1)
            corner = (begin // width, begin % width)[: len(self.shape)]
            part = Box("", corner, (rows, (end - begin) // rows)[: len(self.shape)])
            for piece in self.pieces:
                common = part.intersect(Box("", piece.local, piece.box.shape))
                if common is not None:
                    box_start = tuple(
                        a - b + c for a, b, c in zip(common.start, piece.local, piece.box.start, strict=True)
                    )
                    box = Box(piece.box.name, box_start, common.shape)
                    yield FlatPiece(box, begin - start, part.shape, common.within(part))


@dataclass(frozen=True, slots=True)
class Replicated:
    name: str

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        shape = tensors[self.name]
        origin = (0,) * len(shape)
        return LocalParameter(shape, (Piece(Box(self.name, origin, shape), origin),))


@dataclass(frozen=True, slots=True)
class Split:
    name: str
    dim: int = 0
    multiple: int = 1
    """The dimension is padded up to a multiple of this before it is cut."""

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        shape = tensors[self.name]
        share = -(-shape[self.dim] // self.multiple) * self.multiple // size
        start, stop = rank * share, min((rank + 1) * share, shape[self.dim])
        local_shape = _replace(shape, self.dim, share)
        if stop <= start:
            return LocalParameter(local_shape, ())
        box = Box(self.name, _replace((0,) * len(shape), self.dim, start), _replace(shape, self.dim, stop - start))
        return LocalParameter(local_shape, (Piece(box, (0,) * len(shape)),))


@dataclass(frozen=True, slots=True)
class Stacked:
    names: tuple[str, ...]
    dim: int = 0
    """Along which each tensor is cut before they are stacked."""

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        pieces, rows = [], 0
        for name in self.names:
            local = Split(name, self.dim).place(tensors, rank, size)
            pieces += [Piece(piece.box, (rows, *piece.local[1:])) for piece in local.pieces]
            rows += local.shape[0]
        return LocalParameter((rows, *local.shape[1:]), tuple(pieces))


@dataclass(frozen=True, slots=True)
class Grouped:
    names: tuple[str, ...]
    """Query, key, value."""
    groups: int

    def place(self, tensors: dict[str, Shape], rank: int, size: int) -> LocalParameter:
        # The full parameter is group after group of (query rows, key rows, value rows). Each rank takes an equal run of
        # rows, which cuts a group in two when there are fewer groups than ranks.
        widths = [tensors[name][0] // self.groups for name in self.names]
        columns = tensors[self.names[0]][1:]
        rest = (0,) * len(columns)
        share = sum(widths) * self.groups // size
        first, last = rank * share, (rank + 1) * share
        pieces, row = [], 0
        for group in range(self.groups):
            for name, width in zip(self.names, widths, strict=True):
                start, stop = max(row, first), min(row + width, last)
                if start < stop:
                    box = Box(name, (group * width + start - row, *rest), (stop - start, *columns))
                    pieces.append(Piece(box, (start - first, *rest)))
                row += width
        return LocalParameter((share, *columns), tuple(pieces))


Rule = Replicated | Split | Stacked | Grouped


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

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
EXPERT_MATRICES = {"mlp": GATE_UP_DOWN, "block_sparse_moe": ("w1", "w3", "w2")}
"""Gate, up and down projection of an expert by `Experts.names`."""


def hf_tensors(model: ModelShape) -> dict[str, Shape]:
    """Name and shape of every tensor of the HF checkpoint. A tied model has no lm_head."""
    widths = {"q": model.heads * model.head_dim, "k": model.kv_heads * model.head_dim}
    widths["v"] = widths["k"]
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (model.vocab, model.hidden)}
    for layer in range(model.num_layers):
        at = f"model.layers.{layer}."
        for name, rows in widths.items():
            tensors[at + f"self_attn.{name}_proj.weight"] = (rows, model.hidden)
            if model.qkv_bias:
                tensors[at + f"self_attn.{name}_proj.bias"] = (rows,)
            if model.qk_norm and name != "v":
                tensors[at + f"self_attn.{name}_norm.weight"] = (rows if model.qk_norm == "whole" else model.head_dim,)
        tensors[at + "self_attn.o_proj.weight"] = (model.hidden, widths["q"])
        for name in NORMS[model.norms]:
            tensors[at + f"{name}.weight"] = (model.hidden,)
        if experts := model.experts_of(layer):
            moe, matrices = f"{at}{experts.names}.", EXPERT_MATRICES[experts.names]
            tensors[moe + "gate.weight"] = (experts.count, model.hidden)
            for expert in range(experts.count):
                tensors |= _mlp_tensors(f"{moe}experts.{expert}.", matrices, model.hidden, experts.ffn)
        else:
            tensors |= _mlp_tensors(at + "mlp.", GATE_UP_DOWN, model.hidden, model.ffn)
    tensors["model.norm.weight"] = (model.hidden,)
    if not model.tied:
        tensors["lm_head.weight"] = (model.vocab, model.hidden)
    return tensors


def _mlp_tensors(at: str, matrices: tuple[str, str, str], hidden: int, ffn: int) -> dict[str, Shape]:
    shapes = ((ffn, hidden), (ffn, hidden), (hidden, ffn))
    return {f"{at}{name}.weight": shape for name, shape in zip(matrices, shapes, strict=True)}


def _mlp_rules(at: str, hf_at: Sequence[str], matrices: tuple[str, str, str] = GATE_UP_DOWN) -> dict[str, Rule]:
    """The rules of one gated layer, or of several one above the other."""
    gate, up, down = matrices
    return {
        at + "linear_fc1.weight": Stacked(tuple(f"{one}{name}.weight" for one in hf_at for name in (gate, up))),
        at + "linear_fc2.weight": Stacked(tuple(f"{one}{down}.weight" for one in hf_at), dim=1),
    }


def _layer_rules(model: ModelShape, layer: int) -> dict[str, Rule]:
    """Megatron's parameters of one layer except its experts."""
    at = f"model.layers.{layer}."

    def qkv(kind: str) -> Grouped:
        return Grouped(tuple(f"{at}self_attn.{name}_proj.{kind}" for name in "qkv"), model.kv_heads)

    rules: dict[str, Rule] = {
        "self_attention.linear_qkv.weight": qkv("weight"),
        "self_attention.linear_proj.weight": Split(at + "self_attn.o_proj.weight", dim=1),
    }
    for hf_name, name in NORMS[model.norms].items():
        rules[f"{name}.weight"] = Replicated(f"{at}{hf_name}.weight")
    if experts := model.experts_of(layer):
        rules["mlp.router.weight"] = Replicated(f"{at}{experts.names}.gate.weight")
    else:
        rules |= _mlp_rules("mlp.", [at + "mlp."])
    if model.qkv_bias:
        rules["self_attention.linear_qkv.bias"] = qkv("bias")
    if model.qk_norm:
        rule = Split if model.qk_norm == "whole" else Replicated
        rules["self_attention.q_layernorm.weight"] = rule(at + "self_attn.q_norm.weight")
        rules["self_attention.k_layernorm.weight"] = rule(at + "self_attn.k_norm.weight")
    return rules


def _expert_rules(model: ModelShape, layer: int, layout: Layout, expert_rank: int) -> dict[str, Rule]:
    """The experts of one layer that a rank holds."""
    experts = model.experts_of(layer)
    if experts is None:
        return {}
    share = experts.count // layout.expert
    own = range(expert_rank * share, (expert_rank + 1) * share)
    hf_at = [f"model.layers.{layer}.{experts.names}.experts.{expert}." for expert in own]
    return _mlp_rules("mlp.experts.", hf_at, EXPERT_MATRICES[experts.names])


def local_parameters(model: ModelShape, layout: Layout, rank: int) -> dict[str, LocalParameter]:
    """Every Megatron parameter that `rank` holds; layers are counted from 0 over the whole model."""
    place = layout.coordinate(rank)
    tensors = hf_tensors(model)
    parameters: dict[str, LocalParameter] = {}

    def add(name: str, rule: Rule) -> None:
        parameters[name] = rule.place(tensors, place.tensor, layout.tensor)

    if place.pipeline == 0:
        add("embedding.word_embeddings.weight", Split("model.embed_tokens.weight", multiple=VOCAB_MULTIPLE))
    for chunk in range(layout.virtual_pipeline):
        for layer in layout.chunk_layers(model.num_layers, place.pipeline, chunk):
            at = f"decoder.layers.{layer}."
            for name, rule in _layer_rules(model, layer).items():
                add(at + name, rule)
            for name, rule in _expert_rules(model, layer, layout, place.expert).items():
                expert_tensor = place.tensor if layout.expert_tensor > 1 else 0
                parameters[at + name] = rule.place(tensors, expert_tensor, layout.expert_tensor)
    if place.pipeline == layout.pipeline - 1:
        add("decoder.final_layernorm.weight", Replicated("model.norm.weight"))
        if not model.tied:
            add("output_layer.weight", Split("lm_head.weight", multiple=VOCAB_MULTIPLE))
        elif layout.pipeline > 1:
            add("output_layer.weight", Split("model.embed_tokens.weight", multiple=VOCAB_MULTIPLE))
            parameters["output_layer.weight"] = replace(parameters["output_layer.weight"], is_copy=True)
    return parameters


def training_boxes(model: ModelShape, layout: Layout) -> list[list[Box]]:
    """For each training rank, the boxes it holds, in the order of its parameters and pieces."""
    return [
        [piece.box for parameter in local_parameters(model, layout, rank).values() for piece in parameter.pieces]
        for rank in range(layout.world_size)
    ]


ENGINE_VOCAB_MULTIPLE = 64
"""vLLM pads vocabularies up to a multiple of this."""


def engine_boxes(model: ModelShape, layout: InferLayout) -> list[list[Box]]:
    """For each worker of one vLLM engine, the boxes it holds, in the order of the HF tensors."""
    tensors = hf_tensors(model)
    return [
        [
            piece.box
            for name in tensors
            for piece in _engine_parameter(name, tensors, model, worker, layout.tensor).pieces
        ]
        for worker in range(layout.tensor)
    ]


def _engine_parameter(
    name: str, tensors: dict[str, Shape], model: ModelShape, worker: int, workers: int
) -> LocalParameter:
    kind = name.split(".")[-2]
    if "norm" in kind or kind == "gate":
        return Replicated(name).place(tensors, worker, workers)
    if kind in ("embed_tokens", "lm_head"):
        return Split(name, multiple=ENGINE_VOCAB_MULTIPLE).place(tensors, worker, workers)
    if kind in ("k_proj", "v_proj") and model.kv_heads < workers:
        # With fewer key-value heads than workers, neighbours hold copies of one head.
        return Split(name).place(tensors, worker * model.kv_heads // workers, model.kv_heads)
    return Split(name, dim=1 if kind in ("o_proj", "down_proj", "w2") else 0).place(tensors, worker, workers)


def _replace(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim + 1 :])
