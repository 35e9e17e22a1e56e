"""The rounds between learners of different nodes, in which comes what those of a node then hand on to its engines."""

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
"""Times the limit of a sync: a learner may first have waited that long for an engine that hangs."""


@dataclass(frozen=True, slots=True)
class BroughtSlice(LateSlice):
    """A slice that a round brings: its values are there from the round's `settle` until its `forget`."""

    relay: NodeRounds
    number: int
    """Of the round."""
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
    """One learner's part in all rounds. All learners make one, and go through their rounds in order."""

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
            live: what this learner holds.
            sent, received: round by round, see `NodeRoutes`.
            store: of this group of learners alone.
            host: where the store is.
        """
        self.rank, self._received = rank, received
        self._sent = [{peer: WeightMessage(live, boxes) for peer, boxes in round_.items()} for round_ in sent]
        self.num_rounds = max(len(sent), len(received))
        self.brought: dict[int, torch.Tensor] = {}
        """By round, what has come, or comes."""
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
        """All boxes that come, with their views."""
        for number, round_ in enumerate(self._received):
            start = 0
            for boxes in round_.values():
                for box in boxes:
                    yield box, BroughtSlice(self, number, start, box.shape)
                    start += box.size

    def begin(self, number: int) -> None:
        """Begin a round; those before it are settled."""
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
        """Give up what a round has brought."""
        self.brought.pop(number, None)

    def _lost(self, peers: Sequence[int], err: Exception) -> RuntimeError:
        names = ", ".join(f"training rank {peer}" for peer in peers)
        return RuntimeError(
            f"training rank {self.rank} could not exchange weights between nodes with {names} within "
            f"{PATIENCE} x weight_sync_timeout: {err}"
        )

    def close(self) -> None:
        """Leave."""
        self._group.close()
