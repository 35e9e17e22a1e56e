"""Routing replay: experts are those that were chosen before, by the engine that sampled or by the policy that scored the batch.

Under the engine's (R3, arXiv:2510.11370) trainer and sampler compute with the same experts, of which rounding alone makes them choose
others for a part of the tokens. Under the policy's own (arXiv:2507.18071, section 5.3) the ratio of old and new policy compares the
same experts. Only the choice is replayed: the experts' weights come from the current router, which is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from mgrpo.layout import Coordinate, Layout
from mgrpo.models.shape import ModelShape
from mgrpo.parallel import backend
from mgrpo.parallel.moe.choices import Choices
from mgrpo.types import Routes

Routing = dict[int, list[torch.Tensor]]
"""Choices of the routers of each chunk of this rank, each `[tokens, top_k]` int64."""


class RoutingReplay:
    """The routers of this rank's chunks; none without experts, or if the model neither replays choices nor computes them again."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], shape: ModelShape, layout: Layout, coordinate: Coordinate
    ) -> None:
        self.routers: list[list[Choices]] = []
        for chunk in chunks:
            own: list[Choices] = []
            for module in chunk.modules():
                if isinstance(module, MoELayer) and module.router.router_replay is not None:
                    own.append(Choices())
                    module.router.router_replay = module.token_dispatcher.choices = own[-1]
            self.routers.append(own)
        mixtures = [layer for layer in range(shape.num_layers) if shape.has_experts(layer)]
        held = [layout.chunk_layers(shape.num_layers, coordinate.pipeline, chunk) for chunk in range(len(chunks))]
        self.columns = [[mixtures.index(layer) for layer in layers if layer in mixtures] for layers in held]
        """Places of each chunk's routers among all of the model's."""
        self.share = layout.tensor if layout.sequence_parallel else 1
        self.part = coordinate.tensor if layout.sequence_parallel else 0
        self.num_layers = len(mixtures)
        self.is_recording = False

    @property
    def _all(self) -> list[Choices]:
        return [router for routers in self.routers for router in routers]

    def record(self) -> None:
        """Record choices from now on; `recorded` returns those of the last forward pass."""
        self.is_recording = any(self.routers)
        for router in self._all:
            router.is_recording = True

    def recorded(self, chunk: int) -> list[torch.Tensor]:
        """The choices of one chunk's routers."""
        found = [router.recorded for router in self.routers[chunk]]
        return [choice for choice in found if choice is not None]

    def of(self, chunk: int, routes: Routes) -> list[torch.Tensor]:
        """Choices of one chunk's routers, -1 where `routes` are unknown.

        Args:
            routes: `[tokens, MoE layers, top_k]`, of this context rank's tokens and all layers of the model.
        """
        if not self.routers[chunk]:
            return []
        assert routes.shape[1] == self.num_layers, f"routes of {routes.shape[1]} MoE layers, not {self.num_layers}"
        assert len(routes) % self.share == 0, f"{len(routes)} tokens for {self.share} ranks"
        rows = len(routes) // self.share
        own = routes[self.part * rows : (self.part + 1) * rows, self.columns[chunk]]
        chosen = np.where((own == np.iinfo(own.dtype).max).all(2, keepdims=True), -1, own.astype(np.int16))
        return list(backend.to_device(chosen.transpose(1, 0, 2), np.int16))

    def replay(self, chunk: int, choices: Sequence[torch.Tensor] | None, *, is_training: bool) -> None:
        """Fix the choices of one chunk's routers for the next forward pass and its recomputation; None: they choose."""
        for place, router in enumerate(self.routers[chunk]):
            router.fixed, router.is_training = None if choices is None else choices[place], is_training

    def choose_freely(self) -> None:
        """Stop recording and replaying."""
        self.is_recording = False
        for router in self._all:
            router.choose_freely()

    def take_counts(self) -> tuple[int, int]:
        """Choices that were fixed in training since the last call, and those of them that this rank's routers would not have made."""
        counts = [count for router in self._all for count in router.counted]
        for router in self._all:
            router.counted.clear()
        total = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
        return total[0], total[1]
