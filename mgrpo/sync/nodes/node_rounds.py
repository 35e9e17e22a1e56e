"""Rounds between learners of different nodes, which bring the slices that learners then forward to engines of their own node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mgrpo.models.placement.boxes import Box
from mgrpo.sync.group import Transfer, join_group
from mgrpo.sync.live import LateSlice, LiveBoxes, WeightMessage
from mgrpo.sync.nodes.routes import SentRound

PATIENCE = 2
"""Multiple of a sync's time limit: a learner may first have waited for an engine that hangs."""


@dataclass(frozen=True, slots=True)
class BroughtSlice(LateSlice):
    """A slice that arrives in a round; its values exist from the round's `settle` until its `forget`."""

    relay: NodeRounds
    number: int
    """Number of the round."""
    start: int
    shape: tuple[int, ...]
    region: tuple[slice, ...] = ()

    def values(self) -> torch.Tensor:
        """See `LateSlice`."""
        size = torch.Size(self.shape).numel()
        return self.relay.brought[self.number][self.start : self.start + size].view(self.shape)[self.region]

    def __getitem__(self, region: tuple[slice, ...]) -> BroughtSlice:
        assert not self.region, "it is cut once"
        return BroughtSlice(self.relay, self.number, self.start, self.shape, region)


class NodeRounds:
    """One learner's part in all rounds. Every learner makes one and runs its rounds in order."""

    def __init__(
        self,
        live: LiveBoxes,
        *,
        sent: Sequence[SentRound],
        received: Sequence[SentRound],
        rank: int,
        size: int,
        store: dist.Store,
        host: str,
        timeout_s: float,
    ) -> None:
        """Meet the others.

        Args:
            live: the boxes of this learner.
            sent, received: one entry per round, see `NodeRoutes`.
            store: of this group of learners alone.
            host: of the store.
        """
        self.rank, self._received = rank, received
        self._sent = [{peer: WeightMessage(live, boxes) for peer, boxes in round_.items()} for round_ in sent]
        self.num_rounds = max(len(sent), len(received))
        self.brought: dict[int, torch.Tensor] = {}
        """Buffers for arriving slices, by round."""
        self._live, self._timeout_s = live, PATIENCE * timeout_s
        self._under_way: dict[int, Transfer] = {}
        store.set(f"here/{rank}", "")
        store.wait([f"here/{other}" for other in range(size)], timedelta(seconds=self._timeout_s))
        self._group = join_group(
            store,
            rank=rank,
            size=size,
            dtype=live.dtype,
            device=live.device,
            host=host,
            timeout_s=self._timeout_s,
        )

    def slices(self) -> Iterator[tuple[Box, BroughtSlice]]:
        """All boxes that arrive, with their views."""
        for number, round_ in enumerate(self._received):
            start = 0
            for boxes in round_.values():
                for box in boxes:
                    yield box, BroughtSlice(self, number, start, box.shape)
                    start += box.size

    def begin(self, number: int) -> None:
        """Begin a round; earlier ones must be settled."""
        received = self._received[number] if number < len(self._received) else {}
        sizes = [sum(box.size for box in boxes) for boxes in received.values()]
        self.brought[number] = torch.empty(sum(sizes), dtype=self._live.dtype, device=self._live.device)
        into = dict(zip(received, self.brought[number].split(sizes), strict=True)) if sizes else {}
        messages = self._sent[number] if number < len(self._sent) else {}
        if messages or into:
            self._under_way[number] = self._group.exchange(messages, into, lost=self._lost)

    def settle(self, number: int) -> None:
        """Wait for a round.

        Raises:
            RuntimeError: naming the learners that were waited for.
        """
        if (transfer := self._under_way.pop(number, None)) is not None:
            transfer.settle()

    def forget(self, number: int) -> None:
        """Drop the slices of a round."""
        self.brought.pop(number, None)

    def _lost(self, peers: Sequence[int], err: Exception) -> RuntimeError:
        names = ", ".join(f"training rank {peer}" for peer in peers)
        return RuntimeError(
            f"training rank {self.rank} could not exchange weights between nodes with {names} within "
            f"{PATIENCE} x weight_sync_timeout: {err}"
        )

    def close(self) -> None:
        """Leave the group."""
        self._group.close()
