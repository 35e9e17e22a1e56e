"""Low-rank adapters (LoRA): the matrices that have one, their names, and their places on each rank. Pure.

A matrix W computes with W + scale B A (Hu et al., arXiv 2106.09685). Every Hugging Face matrix has its own A and B, as
`peft` stores them. A layer whose W is fused from several matrices holds two parameters:
    a  `[matrices * rank, inputs]`  their A's one below the other, cut along the columns as the layer's weight is
    b  `[rows, rank]`               the rows of the layer's weight, each with its row of B
So B follows the rule of the weight that it adapts, including interleaved and stacked rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.placement.boxes import Box, LocalParameter, Piece, Shape
from mgrpo.models.placement.mlp_rows import EXPERT_MATRICES
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import engine_boxes, hf_tensors, local_parameters

_QKV = ("q_proj", "k_proj", "v_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_DELTA = tuple(f"in_proj_{name}" for name in ("qkvz", "ba", "qkv", "z", "b", "a"))
LINEAR_LAYERS = tuple(
    dict.fromkeys(
        (
            *_QKV,
            *_LATENT,
            "o_proj",
            *_DELTA,
            "out_proj",
            *(name for names in EXPERT_MATRICES.values() for name in names),
        )
    )
)
"""Short names of the matrices that can have an adapter. Embeddings, the LM head and routers cannot."""
ENGINE_ADAPTER = 1
"""vLLM's number of the policy's adapter, in engines that hold it separately from the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """The adapters of a model."""

    rank: int
    alpha: float
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski, arXiv 2312.03732)."""
    targets: tuple[str, ...] = ()
    """Names from `LINEAR_LAYERS` that have an adapter; empty: all."""
    is_merged: bool = True
    """Layers compute with round(W + scale B A), and engines receive that. Otherwise both compute with W and separately with A and
    scale B, and engines receive only these two.
    """

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def adapts(self, hf_tensor: str) -> bool:
        """True if this tensor of a Hugging Face checkpoint has an adapter."""
        *_, layer, kind = hf_tensor.split(".")
        return kind == "weight" and layer in (self.targets or LINEAR_LAYERS) and layer in LINEAR_LAYERS


def lora_a(matrix: str) -> str:
    """Name of the A `[rank, inputs]` of an HF tensor `matrix`, which ends in ".weight"."""
    return matrix.removesuffix("weight") + "lora_A.weight"


def lora_b(matrix: str) -> str:
    """Name of the B `[outputs, rank]`; see `lora_a`."""
    return matrix.removesuffix("weight") + "lora_B.weight"


def adapter_tensors(model: ModelShape, lora: LoraShape) -> dict[str, Shape]:
    """Name and shape of every adapter tensor, in the order of `hf_tensors`, A before B."""
    tensors: dict[str, Shape] = {}
    for name, shape in hf_tensors(model).items():
        if lora.adapts(name):
            tensors[lora_a(name)] = (lora.rank, shape[1])
            tensors[lora_b(name)] = (shape[0], lora.rank)
    return tensors


def are_apart(lora: LoraShape | None) -> TypeGuard[LoraShape]:
    """True if engines hold adapters separately from the model's weights, and receive nothing else."""
    return lora is not None and not lora.is_merged


def sent_tensors(model: ModelShape, lora: LoraShape | None) -> dict[str, Shape]:
    """Name and shape of every tensor that engines are sent."""
    return adapter_tensors(model, lora) if are_apart(lora) else hf_tensors(model)


def engine_adapter_boxes(model: ModelShape, layout: InferLayout, lora: LoraShape) -> list[list[Box]]:
    """Boxes of adapters for each worker of one vLLM engine, without the model's weights. A has the columns of the worker's weight, and B its rows."""
    boxes: list[list[Box]] = []
    for held in engine_boxes(model, layout):
        pairs: dict[Box, None] = {}
        for box in held:
            if lora.adapts(box.name):
                pairs[Box(lora_a(box.name), (0, box.start[1]), (lora.rank, box.shape[1]))] = None
                pairs[Box(lora_b(box.name), (box.start[0], 0), (box.shape[0], lora.rank))] = None
        boxes.append([*pairs])
    return boxes


def training_adapter_boxes(model: ModelShape, layout: Layout, lora: LoraShape) -> list[list[Box]]:
    """Boxes of adapters that each training rank holds."""
    ranks = []
    for rank in range(layout.world_size):
        places = (adapter_places(*held, lora) for held in local_parameters(model, layout, rank).items())
        ranks.append([piece.box for pair in places if pair for place in pair for piece in place.pieces])
    return ranks


def adapter_places(weight: str, place: LocalParameter, lora: LoraShape) -> tuple[LocalParameter, LocalParameter] | None:
    """Places of a and b of the layer whose `weight` is at `place`; None if none of its matrices has an adapter.

    Rows of b that no piece covers belong to matrices without an adapter.
    """
    matrices = [name for name in _matrices(weight, place) if lora.adapts(name)]
    if not matrices:
        return None
    first_column, columns, rank = place.pieces[0].box.start[1], place.shape[1], lora.rank
    a = tuple(
        Piece(Box(lora_a(matrix), (0, first_column), (rank, columns)), (number * rank, 0))
        for number, matrix in enumerate(matrices)
    )
    b = tuple(
        Piece(
            Box(lora_b(piece.box.name), (piece.box.start[0], 0), (piece.box.shape[0], rank)),
            (piece.local[0], 0),
        )
        for piece in place.pieces
        if piece.box.name in matrices
    )
    return LocalParameter((len(matrices) * rank, columns), a), LocalParameter((place.shape[0], rank), b)


def _matrices(weight: str, place: LocalParameter) -> Sequence[str]:
    """All matrices that the layer is fused of, in its order.

    A rank may hold no row of some: query, key and value of few key-value heads on many ranks. It still holds their A.
    """
    names = list(dict.fromkeys(piece.box.name for piece in place.pieces))
    if not weight.endswith("linear_qkv.weight"):
        return names
    stem = names[0].removesuffix(".weight").rpartition(".")[0]
    return [f"{stem}.{name}.weight" for name in _QKV]
