"""Routing replay (arXiv:2507.18071, section 5.3): train on the experts that were chosen when the policy scored the batch.

The ratio of a token whose experts changed between the old and the current policy means little; with replay both use the
same experts. Only the choice is replayed: the experts' weights come from the current router, which is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

Routing = dict[int, list[torch.Tensor]]
"""For each chunk of this rank the choices of its routers, each `[tokens, top_k]` int64."""


class RoutingReplay:
    """The routers of this rank's chunks; there are none without experts, or if the model was not built for replay."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.routers: list[list[RouterReplay]] = [
            [module.router_replay for module in chunk.modules() if getattr(module, "router_replay", None) is not None]
            for chunk in chunks
        ]
        self.is_recording = False

    def record(self) -> None:
        """Record choices from now on; `recorded` returns those of the last forward pass."""
        self.is_recording = any(self.routers)
        for router in (router for routers in self.routers for router in routers):
            router.set_router_replay_action(RouterReplayAction.RECORD)

    def recorded(self, chunk: int) -> list[torch.Tensor]:
        """The choices of one chunk's routers."""
        return [router.get_recorded_indices() for router in self.routers[chunk]]

    def replay(self, chunk: int, choices: Sequence[torch.Tensor]) -> None:
        """Fix the choices of one chunk's routers for the next forward pass and its recomputation."""
        for router, choice in zip(self.routers[chunk], choices, strict=True):
            router.clear_indices()
            router.set_target_indices(choice)
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def choose_freely(self) -> None:
        """Stop recording and replaying."""
        self.is_recording = False
        for router in (router for routers in self.routers for router in routers):
            router.clear_indices()
            router.clear_router_replay_action()
