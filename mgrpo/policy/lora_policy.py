"""The adapters of a policy: their places on this rank, their initial values, and the weights merged with them."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.adapters import LoraShape, adapter_places, adapter_tensors
from mgrpo.models.placement.boxes import Box, LocalParameter, Shape
from mgrpo.parallel.lora import LoraAdapter
from mgrpo.policy.parameters import ShardedParameters
from mgrpo.policy.weights import Read

_LAYERS = (
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_proj",
    "in_proj",
    "out_proj",
    "linear_fc1",
    "linear_fc2",
)


@dataclass(frozen=True, slots=True)
class MergedSlice:
    """A slice computed from an adapter on read, which exists only while it is used: W with it merged, or scale B."""

    weight: Callable[[], torch.Tensor]
    """Makes the current whole local tensor; slices of one tensor have the same."""
    region: tuple[slice, ...]

    def __getitem__(self, region: tuple[slice, ...]) -> MergedSlice:
        inner = zip(self.region, region, strict=True)
        return MergedSlice(self.weight, tuple(slice(a.start + b.start, a.start + b.stop) for a, b in inner))


def made(boxes: Iterable[tuple[Box, torch.Tensor | MergedSlice]]) -> Iterator[tuple[Box, torch.Tensor]]:
    """Boxes with their values; merged weights are made one after another, each once for consecutive boxes of one weight."""
    for _, neighbours in itertools.groupby(boxes, key=lambda held: getattr(held[1], "weight", None)):
        weight: torch.Tensor | None = None
        for box, view in neighbours:
            if isinstance(view, torch.Tensor):
                yield box, view
            else:
                weight = view.weight() if weight is None else weight
                yield box, weight[view.region]


class Adapters:
    """Adapters of all adapted layers on this rank; freezes the model, and adds their parameters to its `parameters`."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], parameters: ShardedParameters, lora: LoraShape, *, seed: int
    ) -> None:
        """
        Raises:
            ValueError: a chunk of the model would have no adapter, and so nothing to train.
        """
        self.parameters, self.lora = parameters, lora
        self.by_weight: dict[str, LoraAdapter] = {}
        """Adapters by the name of the weight that each adapts."""
        names = {id(parameter): name for name, parameter in parameters.live.items()}
        for chunk in chunks:
            chunk.requires_grad_(False)
            layers = [layer for layer in chunk.modules() if id(getattr(layer, "weight", None)) in names]
            if not any([self._adapt(names[id(layer.weight)], layer) for layer in layers]):
                raise ValueError(
                    f"lora_target_modules={' '.join(lora.targets)} leaves a pipeline stage without any adapter; use all-linear"
                )
        parameters.load(parameters.added, initial_values(adapter_tensors(parameters.shape, lora), seed))

    def _adapt(self, name: str, layer: torch.nn.Module) -> bool:
        """Give a layer an adapter; False if none of its matrices should have one."""
        places = adapter_places(name, self.parameters.places[name], self.lora)
        if places is None:
            return False
        experts, part_of_row = getattr(layer, "experts", 1), _part_of_row(*places)
        adapter = self.by_weight[name] = LoraAdapter(
            layer,
            rank=self.lora.rank,
            scale=self.lora.scale,
            parts=len(places[0].pieces) // experts,
            # Of the first expert; those of all are alike.
            part_of_row=part_of_row[: len(part_of_row) // experts],
            is_merged=self.lora.is_merged,
        )
        adapter.adapt(layer)
        own = name.removesuffix("weight") + "adapter."
        self.parameters.add(own + "a", adapter.a, places[0])
        self.parameters.add(own + "b", adapter.b, places[1])
        return True

    def live_boxes(self) -> Iterator[tuple[Box, torch.Tensor | MergedSlice]]:
        """Every box of the model that this rank holds, each with its live view; see `Policy.live_boxes`."""
        live = self.parameters.live
        for name in self.parameters.model:
            if name in self.by_weight:
                weight = partial(self.by_weight[name].merged, live[name])
                for piece in self.parameters.places[name].pieces:
                    yield piece.box, MergedSlice(weight, piece.region)
            else:
                yield from self.parameters.boxes([name])

    def sent_boxes(self) -> Iterator[tuple[Box, torch.Tensor | MergedSlice]]:
        """Every box of A and of scale B that this rank holds, each with its live view."""
        for name, adapter in self.by_weight.items():
            own = name.removesuffix("weight") + "adapter."
            yield from self.parameters.boxes([own + "a"])
            scaled = adapter.scaled_b
            for piece in self.parameters.places[own + "b"].pieces:
                yield piece.box, MergedSlice(scaled, piece.region)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model without its adapters."""
        for adapter in self.by_weight.values():
            adapter.is_enabled = False
        try:
            yield
        finally:
            for adapter in self.by_weight.values():
                adapter.is_enabled = True

    @torch.no_grad()
    def update_ratio(self, group: dist.ProcessGroup) -> float:
        """|scale B A| / |W| (Frobenius norms), the mean over all adapted layers. All ranks of `group`, on the CPU, must call."""
        squares = torch.zeros(self.parameters.shape.num_layers, len(_LAYERS), 2, dtype=torch.float64)
        own = [adapter.squares(self.parameters.live[name]) for name, adapter in self.by_weight.items()]
        for name, values in zip(self.by_weight, torch.stack(own).cpu(), strict=True):
            _, _, layer, *_, kind, _ = name.split(".")
            squares[int(layer), _LAYERS.index(kind)] += values
        # Replicas count their layer's update as often as its weight.
        dist.all_reduce(squares, group=group)
        update, weight = squares.flatten(0, 1).unbind(1)
        return float((update / weight)[weight > 0].sqrt().mean())


def settings_with_adapters(settings: Parallel, layout: Layout) -> Parallel:
    """The settings under which layers can have adapters: Megatron's own layers where the machine would choose others.

    Raises:
        ValueError: the layout or the settings exclude adapters.
    """
    if layout.sharding >= 2:
        raise ValueError(
            f"adapters (use_peft=true) cannot be trained with zero_stage={layout.zero_stage}: Megatron-FSDP asks for gradients of "
            "all weights; use zero_stage=1, and tensor or pipeline parallelism to share the model's own weights"
        )
    if settings.transformer_impl == "transformer_engine":
        raise ValueError(
            "adapters (use_peft=true) are on Megatron's own layers only, got transformer_impl=transformer_engine; use local or auto"
        )
    return replace(settings, transformer_impl="local")


def _part_of_row(a: LocalParameter, b: LocalParameter) -> torch.Tensor:
    """`[rows]` int64: which of the matrices in a belongs to each row of b; -1: none."""
    numbers = {piece.box.name.replace("lora_A", "lora_B"): number for number, piece in enumerate(a.pieces)}
    part_of_row = torch.full((b.shape[0],), -1)
    for piece in b.pieces:
        part_of_row[piece.region[0]] = numbers[piece.box.name]
    return part_of_row


def initial_values(tensors: Mapping[str, Shape], seed: int) -> Read:
    """Reader of initial adapter values, the same on every layout: A uniform within +-1 / sqrt(inputs) as in peft, B zero.

    Args:
        tensors: name and shape of all adapter tensors.
    """

    def read(box: Box) -> torch.Tensor:
        shape = tensors[box.name]
        if box.name.endswith("lora_B.weight"):
            return torch.zeros(box.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {box.name}".encode()))
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)[box.within(Box(box.name, (0, 0), shape))]

    return read
