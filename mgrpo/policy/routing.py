"""Routing replay: experts are those that were chosen before, by the engine that sampled or by the policy that scored the batch.

Under the engine's (R3, arXiv:2510.11370) trainer and sampler compute with the same experts, of which rounding alone makes them choose
others for a part of the tokens. Under the policy's own (arXiv:2507.18071, section 5.3) the ratio of old and new policy compares the
same experts. Only the choice is replayed: the experts' weights come from the current router, which is trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from mgrpo.layout import Coordinate, Layout
from mgrpo.models.shape import ModelShape
from mgrpo.parallel import backend
from mgrpo.types import Routes

Routing = dict[int, list[torch.Tensor]]
"""For each chunk of this rank the choices of its routers, each `[tokens, top_k]` int64."""


class Choices(RouterReplay):
    """The choices of one router, in the place of Megatron's record, whose routers cannot choose for a part of the tokens."""

    def __init__(self) -> None:
        self.fixed: torch.Tensor | None = None
        """`[tokens, top_k]` of the present forward pass; the router chooses where it is below 0, or for all tokens without one."""
        self.is_training = self.is_recording = False
        self.recorded: torch.Tensor | None = None
        self.repeated: deque[torch.Tensor | None] = deque()
        """Those of earlier forward passes whose layers the backward pass computes again, in the same order."""
        self.counted: list[torch.Tensor] = []
        """`[2]` of each pass in training: how many choices were fixed, and how many of these the router would not have made."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores and numbers of the experts, both `[tokens, topk]`, of `scores [tokens, experts]`."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.is_recording:
            self.recorded = own
        is_repeated = torch.is_grad_enabled() and bool(self.repeated)
        fixed = self.repeated.popleft() if is_repeated else self.fixed
        if self.is_training and not torch.is_grad_enabled():
            # Only a layer that will be computed again runs in training without recording its graph.
            self.repeated.append(fixed)
        if fixed is None:
            return values, own
        assert fixed.shape == own.shape, f"choices {tuple(fixed.shape)} for the experts of {tuple(own.shape)}"
        chosen = torch.where(fixed < 0, own, fixed.long())
        if self.is_training and not is_repeated:
            self._count(fixed, own)
        return scores.gather(1, chosen), chosen

    def _count(self, fixed: torch.Tensor, own: torch.Tensor) -> None:
        is_fixed = fixed >= 0
        is_own = (fixed[:, :, None] == own[:, None, :]).any(2)
        self.counted.append(torch.stack((is_fixed.sum(), (is_fixed & ~is_own).sum())))


class RoutingReplay:
    """The routers of this rank's chunks; there are none without experts, or if the model was not built for replay."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], shape: ModelShape, layout: Layout, coordinate: Coordinate
    ) -> None:
        self.routers: list[list[Choices]] = []
        for chunk in chunks:
            own: list[Choices] = []
            for module in chunk.modules():
                if getattr(module, "router_replay", None) is not None:
                    own.append(Choices())
                    module.router_replay = own[-1]
            self.routers.append(own)
        mixtures = [layer for layer in range(shape.num_layers) if shape.has_experts(layer)]
        held = [layout.chunk_layers(shape.num_layers, coordinate.pipeline, chunk) for chunk in range(len(chunks))]
        self.columns = [[mixtures.index(layer) for layer in layers if layer in mixtures] for layers in held]
        """For each chunk the places of its routers among all of the model's."""
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
        """The choices of one chunk's routers, -1 where `routes` say nothing.

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
            assert not router.repeated, "a layer that was to be computed again was not"
            router.fixed = router.recorded = None
            router.is_training = router.is_recording = False

    def take_counts(self) -> tuple[int, int]:
        """Choices that were fixed in training since the last call, and those of them that this rank's routers would not have made."""
        counts = [count for router in self._all for count in router.counted]
        for router in self._all:
            router.counted.clear()
        total = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
        return total[0], total[1]
