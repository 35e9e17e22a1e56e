"""This rank's live parameters as boxes of HF tensors, and the boxes that each other rank holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mgrpo.layout import Layout, least_loaded
from mgrpo.models.adapters import LoraShape, adapter_tensors
from mgrpo.models.placement.box_table import COLUMNS, HeldBoxes, Tensors
from mgrpo.models.placement.boxes import Box, LocalParameter
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import FUSED_NORMS, hf_tensors, local_parameters
from mgrpo.parallel.gather import gather_values
from mgrpo.policy.weights import Read

KindAndBox = tuple[int, Box]
"""A number that the caller chooses, for example for masters or moments, and a box."""


class ShardedParameters:
    """This rank's live parameters, as boxes of HF tensors through the rule table."""

    def __init__(self, chunks: Sequence[torch.nn.Module], shape: ModelShape, layout: Layout, rank: int) -> None:
        self.shape, self.layout = shape, layout
        coordinate, places = layout.coordinate(rank), local_parameters(shape, layout, rank)
        self.live: dict[str, torch.Tensor] = {}
        """Each parameter under its name in the rule table, and each buffer that the table lists: those are never trained."""
        for index, chunk in enumerate(chunks):
            first_layer = layout.chunk_layers(shape.num_layers, coordinate.pipeline, index).start
            for name, parameter in chunk.named_parameters():
                self.live[global_name(name, first_layer)] = parameter
            self.live |= {
                own: buffer
                for name, buffer in chunk.named_buffers()
                if (own := global_name(name, first_layer)) in places
            }
        self.places = places
        """Place of each parameter in the rule table."""
        if self.live.keys() != self.places.keys():
            raise AssertionError(f"model and rule table differ in {sorted(self.live.keys() ^ self.places.keys())}")
        for name, place in self.places.items():
            assert tuple(self.live[name].shape) == place.shape, (name, tuple(self.live[name].shape), place.shape)

        self.model = tuple(self.places)
        """Names of the model's own parameters; `added` are those of adapters."""
        self.frozen = tuple(name for name in self.model if not isinstance(self.live[name], torch.nn.Parameter))
        """Names of tensors that are never trained."""
        self.added: list[str] = []

    def add(self, name: str, parameter: torch.nn.Parameter, place: LocalParameter) -> None:
        """Add a parameter other than the model's own, which holds boxes of other tensors."""
        assert tuple(parameter.shape) == place.shape, (name, tuple(parameter.shape), place.shape)
        self.live[name], self.places[name] = parameter, place
        self.added.append(name)

    def boxes(self, names: Iterable[str]) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every box that these parameters hold on this rank, each with its live view."""
        for name in names:
            for piece in self.places[name].pieces:
                yield piece.box, piece.view(self.live[name].data)

    @torch.no_grad()
    def load(self, names: Iterable[str], read: Read, *, into: Mapping[str, torch.Tensor] | None = None) -> None:
        """Fill these parameters with the values that `read` returns for their boxes; padding rows become 0.

        Of the ranks that hold the same parameters each reads its share and sends it to the others, so that they together read the
        files once. Call while parameters are whole; every rank must call, with the same names as the others that hold them.

        Args:
            into: in the place of the parameters, tensors of their shapes.
        """
        targets = {name: (into or self.live)[name].data for name in names}
        readers = _readers(targets)
        for name, target in targets.items():
            group, number = readers[name]
            if group.rank() != number:
                continue
            pieces = self.places[name].pieces
            if sum(piece.box.size for piece in pieces) < target.numel():
                target.zero_()
            for piece in pieces:
                piece.view(target).copy_(read(piece.box))
        for name, target in targets.items():
            group, number = readers[name]
            if group.size() > 1:
                dist.broadcast(target, group=group, group_src=number)


def _readers(targets: Mapping[str, torch.Tensor]) -> dict[str, tuple[dist.ProcessGroup, int]]:
    """Ranks that hold the same for each parameter, and the one that reads it: that with the fewest bytes so far."""
    loads: dict[dist.ProcessGroup, list[int]] = {}
    found = {}
    for name, target in targets.items():
        group = _replicas(name)
        load = loads.setdefault(group, [0] * group.size())
        number = least_loaded(range(group.size()), load)
        load[number] += target.nbytes
        found[name] = group, number
    return found


def _replicas(name: str) -> dist.ProcessGroup:
    """The ranks that hold the same values of a parameter, while parameters are whole: data and context replicas."""
    if ".experts." in name:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def global_name(name: str, first_layer: int) -> str:
    """A parameter's name in the table, which counts layers over the model; Megatron counts them within a chunk."""
    head, layers, tail = name.partition("decoder.layers.")
    if not layers:
        return name
    index, _, rest = tail.partition(".")
    return f"{head}{layers}{int(index) + first_layer}.{FUSED_NORMS.get(rest, rest)}"


def gather_held(boxes: Iterable[Box], tensors: Tensors, group: dist.ProcessGroup) -> HeldBoxes:
    """Boxes held by each rank. All ranks of `group`, on the CPU, must call.

    Of ranks that hold the same the first one sends its boxes: the others send a hash.
    """
    own = tensors.rows(boxes)
    mark = np.frombuffer(hashlib.sha256(own.tobytes()).digest(), dtype=np.int64)
    marks = gather_values(torch.from_numpy(np.append(mark, len(own))), group).view(-1, len(mark) + 1).tolist()
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, each in enumerate(marks):
        ranks.setdefault(tuple(each), []).append(rank)
    speaks = group.rank() == ranks[tuple(marks[group.rank()])][0]
    said = gather_values(torch.from_numpy(own if speaks else own[:0]).view(-1), group).view(-1, COLUMNS).numpy()
    ends = np.cumsum([length for *_, length in ranks])
    return HeldBoxes(tensors, np.split(said, ends[:-1]), [*ranks.values()])


def gather_boxes(boxes: Sequence[KindAndBox], shape: ModelShape, group: dist.ProcessGroup) -> list[list[KindAndBox]]:
    """The `boxes` of each rank, in its order. All ranks of `group`, on the CPU, must call.

    They are exchanged, because ZeRO shards follow Megatron's buckets and not a formula.
    """
    # The names of adapters do not depend on their rank.
    names = [*hf_tensors(shape), *adapter_tensors(shape, LoraShape(rank=1, alpha=1))]
    index_of_name = {name: index for index, name in enumerate(names)}
    # Rank, kind, tensor, then start and shape, each of up to three dimensions; -1 fills up.
    rows = np.full((len(boxes), 9), -1, dtype=np.int64)
    for row, (kind, box) in zip(rows, boxes, strict=True):
        row[:3] = group.rank(), kind, index_of_name[box.name]
        row[3 : 3 + len(box.start)] = box.start
        row[6 : 6 + len(box.shape)] = box.shape
    by_rank: list[list[KindAndBox]] = [[] for _ in range(group.size())]
    for rank, kind, name, *extent in gather_values(torch.from_numpy(rows).view(-1), group).view(-1, 9).tolist():
        start, size = (tuple(n for n in dims if n >= 0) for dims in (extent[:3], extent[3:]))
        by_rank[rank].append((kind, Box(names[name], start, size)))
    return by_rank
