"""The choices of one router: fixed for some tokens, counted, recorded, and the same where the backward pass computes a layer again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay


class Choices(RouterReplay):
    """Replacement of Megatron's record, whose routers cannot choose for a part of the tokens."""

    def __init__(self) -> None:
        self.fixed: torch.Tensor | None = None
        """`[tokens, top_k]` of the present forward pass; the router chooses where it is below 0, or for all tokens without one."""
        self.is_training = self.is_recording = False
        self.recorded: torch.Tensor | None = None
        self.is_repeated = self.will_repeat = False
        """True if the present pass recomputes an earlier one; true if it will itself be recomputed."""
        self._earlier: deque[torch.Tensor] = deque()
        """`[tokens, top_k]` int16 of the passes that will be computed again, in their order."""
        self.counted: list[torch.Tensor] = []
        """`[2]` of each pass in training: the number of fixed choices, and of those that the router would not have made."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores and numbers of the experts, both `[tokens, topk]`, of `scores [tokens, experts]`."""
        # Only a layer that will be computed again runs in training without recording its graph.
        self.will_repeat = self.is_training and not torch.is_grad_enabled()
        self.is_repeated = torch.is_grad_enabled() and bool(self._earlier)
        if self.is_repeated:
            chosen = self._earlier.popleft().long()
            return scores.gather(1, chosen), chosen
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.is_recording:
            self.recorded = chosen
        if self.fixed is not None:
            fixed, own = self.fixed, chosen
            assert fixed.shape == own.shape, f"choices {tuple(fixed.shape)} for the experts of {tuple(own.shape)}"
            chosen = torch.where(fixed < 0, own, fixed.long())
            values = scores.gather(1, chosen)
            if self.is_training:
                self._count(fixed, own)
        if self.will_repeat:
            self._earlier.append(chosen.to(torch.int16))
        return values, chosen

    def choose_freely(self) -> None:
        """Stop recording and replaying."""
        assert not self._earlier, "a layer that was to be computed again was not"
        self.fixed = self.recorded = None
        self.is_training = self.is_recording = self.is_repeated = self.will_repeat = False

    def _count(self, fixed: torch.Tensor, own: torch.Tensor) -> None:
        is_fixed = fixed >= 0
        is_own = (fixed[:, :, None] == own[:, None, :]).any(2)
        self.counted.append(torch.stack((is_fixed.sum(), (is_fixed & ~is_own).sum())))
