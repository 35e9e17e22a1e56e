"""Routing replay (arXiv:2507.18071, section 5.3): train on the experts that were chosen when the policy scored the batch.

A token whose experts change between the old and the present policy has a ratio that says little; replayed, both take the
same path. What is replayed is the choice: the experts' weights are those of the present router, and are trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

Routing = dict[int, list[torch.Tensor]]
"""For each chunk of this rank its routers' choices, `[tokens, top_k]` int64 each."""


class RoutingReplay:
    """The routers of this rank's chunks; without experts, or unless the model was built for replay, there are none."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.routers: list[list[RouterReplay]] = [
            [module.router_replay for module in chunk.modules() if getattr(module, "router_replay", None) is not None]
            for chunk in chunks
        ]
        self.is_recording = False

    def record(self) -> None:
        """Note every choice from here on; `recorded` gives those of the last forward pass."""
        self.is_recording = any(self.routers)
        for router in (router for routers in self.routers for router in routers):
            router.set_router_replay_action(RouterReplayAction.RECORD)

    def recorded(self, chunk: int) -> list[torch.Tensor]:
        """What the routers of one chunk chose."""
        return [router.get_recorded_indices() for router in self.routers[chunk]]

    def replay(self, chunk: int, choices: Sequence[torch.Tensor]) -> None:
        """Let the routers of one chunk choose that in the next forward pass, and when it is computed again."""
        for router, choice in zip(self.routers[chunk], choices, strict=True):
            router.clear_indices()
            router.set_target_indices(choice)
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def choose_freely(self) -> None:
        """As without replay."""
        self.is_recording = False
        for router in (router for routers in self.routers for router in routers):
            router.clear_indices()
            router.clear_router_replay_action()
