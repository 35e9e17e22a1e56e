"""Weights between Hugging Face safetensors and this rank's live parameters, slice by slice.

Reading opens the checkpoint's files and copies just the slices that the rule table names: no rank holds the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from mgrpo.layout import Layout
from mgrpo.models.family import ModelShape
from mgrpo.models.table import Box, LocalParameter, hf_tensors, local_parameters, stage_layers


def _tensor_files(model_dir: Path) -> dict[str, Path]:
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


class ShardedParameters:
    """This rank's live parameters, seen as boxes of HF tensors through the rule table."""

    def __init__(self, model: torch.nn.Module, shape: ModelShape, layout: Layout, rank: int) -> None:
        self.shape, self.layout = shape, layout
        first_layer = stage_layers(shape, layout, layout.coordinate(rank).pipeline).start
        live = {_global_name(name, first_layer): parameter for name, parameter in model.named_parameters()}
        self.places = local_parameters(shape, layout, rank)
        if live.keys() != self.places.keys():
            raise AssertionError(f"model and rule table differ in {sorted(live.keys() ^ self.places.keys())}")
        for name, place in self.places.items():
            assert tuple(live[name].shape) == place.shape, (name, tuple(live[name].shape), place.shape)
        self.live = live

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every box this rank holds, with the view of the live parameter that is it."""
        for name, place in self.places.items():
            for piece in place.pieces:
                yield piece.box, self.live[name].data[piece.region]

    @torch.no_grad()
    def load(self, model_dir: str | Path) -> None:
        """Read this rank's slices from a Hugging Face folder; padding rows become 0."""
        model_dir = Path(model_dir)
        files = _tensor_files(model_dir)
        expected = hf_tensors(self.shape)
        missing = sorted(expected.keys() - files.keys())
        if missing:
            raise ValueError(f"{model_dir} lacks {len(missing)} tensors, the first are {missing[:3]}")
        open_files: dict[Path, safe_open] = {}
        for name, place in self.places.items():
            self._clear_padding(name, place)
            for piece in place.pieces:
                path = files[piece.box.name]
                if path not in open_files:
                    open_files[path] = safe_open(path, framework="pt")
                source = open_files[path].get_slice(piece.box.name)
                if tuple(source.get_shape()) != expected[piece.box.name]:
                    raise ValueError(
                        f"{path}: {piece.box.name} has shape {source.get_shape()}, "
                        f"config.json implies {list(expected[piece.box.name])}"
                    )
                region = tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.shape, strict=True))
                self.live[name].data[piece.region].copy_(source[region])

    def _clear_padding(self, name: str, place: LocalParameter) -> None:
        if sum(piece.box.size for piece in place.pieces) < self.live[name].numel():
            self.live[name].data.zero_()


def _global_name(name: str, first_layer: int) -> str:
    """Megatron counts layers within a stage; the table counts them over the model."""
    head, mark, tail = name.partition("decoder.layers.")
    if not mark:
        return name
    number, _, rest = tail.partition(".")
    return f"{head}{mark}{int(number) + first_layer}.{rest}"
