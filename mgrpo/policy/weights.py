"""Weights between Hugging Face safetensors and this rank's live parameters, slice by slice.

Reading opens the checkpoint's files and copies just the slices that the rule table names: no rank holds the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from mgrpo.layout import Layout
from mgrpo.models.family import ModelShape
from mgrpo.models.table import Box, LocalParameter, hf_tensors, local_parameters


def tensor_files(model_dir: Path) -> dict[str, Path]:
    """Which file of the checkpoint holds each tensor."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: model_dir / file for name, file in weight_map.items()}
    single = model_dir / "model.safetensors"
    if not single.is_file():
        raise ValueError(
            f"{model_dir} has neither model.safetensors nor model.safetensors.index.json; "
            "only safetensors checkpoints are read (pickles are never loaded)"
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


Read = Callable[[Box], torch.Tensor]
"""Gives the values of one box of an HF tensor, from wherever they are kept."""


def hf_reader(model_dir: str | Path, shape: ModelShape) -> Read:
    """Reads boxes from the safetensors files of a Hugging Face folder; no more than the box is read.

    Raises:
        ValueError: tensors are missing, or have another shape than config.json implies.
    """
    model_dir = Path(model_dir)
    files = tensor_files(model_dir)
    expected = hf_tensors(shape)
    missing = sorted(expected.keys() - files.keys())
    if missing:
        raise ValueError(f"{model_dir} lacks {len(missing)} tensors, the first are {missing[:3]}")
    open_files: dict[Path, safe_open] = {}

    def read(box: Box) -> torch.Tensor:
        path = files[box.name]
        if path not in open_files:
            open_files[path] = safe_open(path, framework="pt")
        source = open_files[path].get_slice(box.name)
        if tuple(source.get_shape()) != expected[box.name]:
            raise ValueError(
                f"{path}: {box.name} has shape {source.get_shape()}, config.json implies {list(expected[box.name])}"
            )
        return source[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]

    return read


class ShardedParameters:
    """This rank's live parameters, seen as boxes of HF tensors through the rule table."""

    def __init__(self, chunks: Sequence[torch.nn.Module], shape: ModelShape, layout: Layout, rank: int) -> None:
        self.shape, self.layout = shape, layout
        place = layout.coordinate(rank)
        first_expert = place.expert * shape.experts.count // layout.expert if shape.experts else 0
        live = {
            global_name(
                name, layout.chunk_layers(shape.num_layers, place.pipeline, number).start, first_expert
            ): parameter
            for number, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }
        self.places = local_parameters(shape, layout, rank)
        if live.keys() != self.places.keys():
            raise AssertionError(f"model and rule table differ in {sorted(live.keys() ^ self.places.keys())}")
        for name, local in self.places.items():
            assert tuple(live[name].shape) == local.shape, (name, tuple(live[name].shape), local.shape)
        self.live = live

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every box this rank holds, with the view of the live parameter that is it."""
        for name, place in self.places.items():
            for piece in place.pieces:
                yield piece.box, self.live[name].data[piece.region]

    @torch.no_grad()
    def load(self, read: Read) -> None:
        """Fill every piece of this rank with what `read` gives for its box; padding rows become 0."""
        for name, place in self.places.items():
            self._clear_padding(name, place)
            for piece in place.pieces:
                self.live[name].data[piece.region].copy_(read(piece.box))

    def _clear_padding(self, name: str, place: LocalParameter) -> None:
        if sum(piece.box.size for piece in place.pieces) < self.live[name].numel():
            self.live[name].data.zero_()


def global_name(name: str, first_layer: int, first_expert: int) -> str:
    """Megatron counts layers within a chunk and experts within a rank; the table counts them over the model."""
    for mark, first in (("decoder.layers.", first_layer), ("local_experts.", first_expert)):
        head, found, tail = name.partition(mark)
        if found:
            number, _, rest = tail.partition(".")
            name = f"{head}{mark}{int(number) + first}.{rest}"
    return name
