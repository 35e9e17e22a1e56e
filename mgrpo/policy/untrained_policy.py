"""The models other than the policy, which no loss trains: the reference and teachers, some of which follow the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mgrpo.models.placement.boxes import Box
from mgrpo.parallel import backend
from mgrpo.policy.policy import Policy
from mgrpo.policy.weights import Read


class UntrainedPolicy(Policy):
    """A policy that is only scored, and whose weights may move towards another's; arguments as for `Policy`.

    Once they have moved they are kept in float32 as well: in bfloat16 a small step would be rounded away. In ZeRO-2 and 3 too
    they are whole on every data-parallel rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._masters: dict[str, torch.Tensor] = {}

    @property
    def has_moved(self) -> bool:
        """True if there are float32 copies: it has moved in this run or before the state that was loaded."""
        return bool(self._masters)

    def load_masters(self, read: Read) -> None:
        """Load as `load`, and keep the values in float32 for `move_towards`."""
        places, live = self.parameters.places, self.parameters.live
        self._masters = {name: torch.empty(place.shape, device=backend.device()) for name, place in places.items()}
        self.parameters.load(places, read, into=self._masters)
        for name, master in self._masters.items():
            live[name].data.copy_(master)

    def master_boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every box of the float32 copies, except a tied head's copy of the embedding."""
        for name, place in self.parameters.places.items():
            if not place.is_copy:
                for piece in place.pieces:
                    yield piece.box, piece.view(self._masters[name])

    @torch.no_grad()
    def move_towards(self, other: Policy, alpha: float) -> None:
        """These weights <- alpha x the other's + (1 - alpha) x these. All ranks must call."""
        for name, parameter in self.parameters.live.items():
            if name not in self._masters:
                self._masters[name] = parameter.data.float()
            master = self._masters[name]
            master.lerp_(other.parameter(name).float(), alpha)
            parameter.data.copy_(master)

    def state_memory(self) -> list[torch.Tensor]:
        """See `Policy`."""
        return list(self._masters.values())
