"""Weights that are made when they are read: how often, how many at a time, and anew after an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mgrpo.models.placement.boxes import Box
from mgrpo.sync.live import LiveBoxes, WeightMessage


@dataclass(frozen=True)
class Slice:
    """Of a weight that is made anew each time."""

    weight: Callable[[], torch.Tensor]
    region: tuple[slice, ...]

    def __getitem__(self, region):
        (own,), (inner,) = self.region, region
        return replace(self, region=(slice(own.start + inner.start, own.start + inner.stop),))


def test_a_weight_is_made_once_for_its_slices_and_anew_after_an_update():
    """One that is kept over an update gives engines the weights of the step before."""
    made, added = [], 0.0

    def weight(name):
        def make():
            made.append(name)
            return torch.arange(6.0) + added

        return make

    boxes = [(Box("norm", (0,), (1,)), torch.ones(1))]
    for name in ("first", "second"):
        whole = weight(name)
        boxes += [
            (Box(f"{name}.{part}", (0,), (3,)), Slice(whole, (slice(3 * part, 3 * part + 3),))) for part in (0, 1)
        ]
    live = LiveBoxes(boxes, torch.float32)
    sent = [Box("second.0", (1,), (2,)), Box("second.1", (0,), (1,))]
    message, other = (
        WeightMessage(live, sent),
        WeightMessage(live, [Box("first.0", (0,), (3,)), Box("norm", (0,), (1,)), sent[1]]),
    )
    assert not made

    def values(message):
        return [[view.tolist() for view in part] for part in message]

    assert values(message) == values(message) == [[[1.0, 2.0], [3.0]]]
    assert made == ["second"]
    assert values(other) == [[[0.0, 1.0, 2.0]], [[1.0]], [[3.0]]]
    assert made == ["second", "first", "second"]
    live.forget()
    added = 10.0
    assert values(message) == [[[11.0, 12.0], [13.0]]]
