"""Tensors of a model that Megatron-core keeps in another form than its Hugging Face checkpoint.

    experts of gpt-oss    a tensor of all experts of a layer `[experts, inputs, outputs]`, gate and up columns alternate
                          kept: matrices `[outputs, inputs]` of each expert, gate and up separate, as in other MoE models
    norm of a delta net   multiplies by its weight
                          kept: multiplies by 1 + weight, as all norms of a model do for Megatron; in a wider type

Everything else is kept unchanged. `models.table` describes the kept tensors as those of another checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mgrpo.model_io.hf_folder import dtype_name, same_bits
from mgrpo.models.placement.boxes import Box
from mgrpo.models.placement.mlp_rows import GATE_UP_DOWN
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors
from mgrpo.policy.weights import Read

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_DELTA_NORM, _DELTA_OUTPUT = ".linear_attn.norm.weight", ".linear_attn.out_proj.weight"


@dataclass(frozen=True, slots=True)
class _Origin:
    """Source of a kept tensor's values in the Hugging Face checkpoint."""

    name: str
    expert: int | None = None
    """The tensor holds this and other experts, transposed."""
    part: int = 0
    parts: int = 1
    """Number of parts; the tensor takes every `parts`-th column, from column `part` on."""
    is_one_less: bool = False


class MegatronView:
    """The kept tensors of a model, to and from those of its Hugging Face checkpoint."""

    def __init__(self, shape: ModelShape) -> None:
        self.kept = shape
        """A model whose Hugging Face checkpoint has the kept tensors."""
        experts = shape.experts
        if experts and experts.names == "gpt_oss":
            self.kept = replace(shape, experts=replace(experts, names="mlp"))
        self._origins = {name: _origin(name, shape) for name in hf_tensors(self.kept)}
        self._kept: dict[str, list[str]] = {}
        for name, own in self._origins.items():
            self._kept.setdefault(own.name, []).append(name)

    def kept_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """The type of each kept tensor, from those of the Hugging Face tensors."""
        return {
            name: _WIDER.get(dtypes[own.name], dtypes[own.name]) if own.is_one_less else dtypes[own.name]
            for name, own in self._origins.items()
        }

    def kept_reader(self, read: Read) -> Read:
        """Reads boxes of kept tensors, from Hugging Face tensors.

        Raises:
            ValueError: while reading, a value that Megatron-core cannot keep exactly.
        """

        def read_kept(box: Box) -> torch.Tensor:
            own = self._origins[box.name]
            if own.expert is None:
                values = read(replace(box, name=own.name))
                return _one_less(values, own.name) if own.is_one_less else values
            start = (own.expert, *box.start[1:], box.start[0] * own.parts)
            size = (1, *box.shape[1:], box.shape[0] * own.parts)
            return read(Box(own.name, start, size))[0, ..., own.part :: own.parts].movedim(-1, 0)

        return read_kept

    def dtypes(self, kept: Mapping[str, torch.dtype], read_kept: Read) -> dict[str, torch.dtype]:
        """The type of each Hugging Face tensor, from those of the kept ones.

        Raises:
            ValueError: the parts of one tensor are of different types.
        """
        dtypes: dict[str, torch.dtype] = {}
        for name, parts in self._kept.items():
            first, *others = parts
            if other := next((part for part in others if kept[part] != kept[first]), None):
                raise ValueError(
                    f"{first} has type {dtype_name(kept[first])} and {other} {dtype_name(kept[other])}, but both are parts of "
                    f"{name}, which has one type"
                )
            dtypes[name] = kept[first]
            if self._origins[first].is_one_less:
                full = hf_tensors(self.kept)[first]
                values = read_kept(Box(first, (0,) * len(full), full))
                dtypes[name] = _dtype_of_one_more(values, kept[name.replace(_DELTA_NORM, _DELTA_OUTPUT)])
        return dtypes

    def reader(self, read_kept: Read, dtypes: Mapping[str, torch.dtype]) -> Read:
        """Reads boxes of Hugging Face tensors, from kept ones."""

        def read(box: Box) -> torch.Tensor:
            parts = [(name, self._origins[name]) for name in self._kept[box.name]]
            name, own = parts[0]
            if own.expert is None:
                values = read_kept(replace(box, name=name))
                return _one_more(values, dtypes[box.name]) if own.is_one_less else values
            out = torch.empty(box.shape, dtype=dtypes[box.name])
            first, last = box.start[-1], box.start[-1] + box.shape[-1]
            for name, own in parts:
                assert own.expert is not None
                expert = own.expert - box.start[0]
                begin, end = (-((own.part - column) // own.parts) for column in (first, last))
                if 0 <= expert < box.shape[0] and begin < end:
                    part = Box(name, (begin, *box.start[1:-1]), (end - begin, *box.shape[1:-1]))
                    columns = slice(begin * own.parts + own.part - first, None, own.parts)
                    out[expert, ..., columns].copy_(read_kept(part).movedim(0, -1))
            return out

        return read


def _origin(name: str, shape: ModelShape) -> _Origin:
    if shape.zero_centred_norms and name.endswith(_DELTA_NORM):
        return _Origin(name, is_one_less=True)
    if shape.experts is None or shape.experts.names != "gpt_oss":
        return _Origin(name)
    before, is_of_expert, after = name.partition(".mlp.experts.")
    if not is_of_expert:
        return _Origin(name.replace(".mlp.gate.", ".mlp.router."))
    number, matrix, kind = after.split(".")
    part = GATE_UP_DOWN.index(matrix)
    tensor = "down_proj" if matrix == "down_proj" else "gate_up_proj"
    return _Origin(
        f"{before}.mlp.experts.{tensor}{'_bias' if kind == 'bias' else ''}",
        expert=int(number),
        part=part % 2,
        parts=1 if tensor == "down_proj" else 2,
    )


def _one_less(values: torch.Tensor, name: str) -> torch.Tensor:
    dtype = _WIDER.get(values.dtype, values.dtype)
    less = values.to(dtype) - 1
    if not same_bits(_one_more(less, values.dtype), values):
        raise ValueError(
            f"{name} holds values next to 0, which Megatron's checkpoints keep less 1, where they would be rounded; use our own "
            "format (--format safetensors) or the Hugging Face folder"
        )
    return less


def _one_more(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (values.double() + 1).to(dtype)


def _dtype_of_one_more(values: torch.Tensor, usual: torch.dtype) -> torch.dtype:
    """The type of values that are kept less 1: the other weights' if it holds them, else that of Megatron's sum, float32."""
    exact = values.double() + 1
    is_usual = values.dtype is not torch.float64 and torch.equal(exact.to(usual).double(), exact)
    return usual if is_usual else torch.float32
