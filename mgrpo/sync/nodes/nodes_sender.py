"""A training rank's end of the weight sync where learners and engines share the devices of several nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from mgrpo.models.placement.box_table import packed
from mgrpo.sync.channel import Cut, Sender
from mgrpo.sync.delivery import Failed, deliver
from mgrpo.sync.group import another_connection
from mgrpo.sync.live import LiveBoxes
from mgrpo.sync.nodes.node_rounds import NodeRounds
from mgrpo.sync.nodes.routes import NodeRoutes


class NodesSender(Sender):
    """A `Sender` to the engines of its own node and to learners of other nodes.

    Args:
        nodes: for each training rank the number of its node, see `NodeRoutes`.
        own: see `Sender`.
    """

    def __init__(self, *args: Any, nodes: Sequence[int], **own: Any) -> None:
        """Meet the other learners."""
        super().__init__(*args, **own)
        self.routes = NodeRoutes(self.plan, nodes, bucket_bytes=self.bucket_bytes)
        self.relay = NodeRounds(
            self.live,
            sent=self.routes.sent(self.rank),
            received=self.routes.received(self.rank),
            rank=self.rank,
            size=len(nodes),
            store=dist.PrefixStore("between nodes", another_connection(self.store)),
            host=self.host,
            timeout_s=self.timeout_s,
        )
        self._handed = self.live.beside(self.relay.slices())

    @property
    def handed(self) -> LiveBoxes:
        """Boxes of this learner, and those that arrive from other nodes."""
        return self._handed

    def _tables(self, engine: int) -> dict[str, Any]:
        """Tables as for one node, and for each worker the number of its slices in each stage."""
        stages = self.routes.stages(engine)
        learners = sorted({rank for each in stages for stage in each for rank in stage})
        tables: dict[str, Any] = {"learners": learners, "slices": [], "sources": [], "stages": []}
        for each in stages:
            parts = [(rank, boxes) for stage in each for rank, boxes in stage.items()]
            tables["slices"].append(packed(self.plan.tensors.rows([box for _, boxes in parts for box in boxes])))
            places = np.repeat([learners.index(rank) for rank, _ in parts], [len(boxes) for _, boxes in parts])
            tables["sources"].append(packed(places[:, None]))
            tables["stages"].append([sum(map(len, stage.values())) for stage in each])
        return tables

    def _sends_to(self, engine: int) -> bool:
        if self.routes.node_of(engine) != self.routes.nodes[self.rank]:
            return False
        return any(self.rank in stage for each in self.routes.stages(engine) for stage in each)

    def _stages(self, engine: int) -> tuple[list[int], list[dict[int, Cut]]]:
        stages = self.routes.stages(engine)
        learners = sorted({rank for each in stages for stage in each for rank in stage})
        found: list[dict[int, Cut]] = []
        for number in range(len(stages[0])):
            found.append(
                {
                    len(learners) + worker: self._cut(each[number][self.rank], len(each[number]))
                    for worker, each in enumerate(stages)
                    if self.rank in each[number]
                }
            )
        return learners, found

    def send(self, version: int, engines: Iterable[int]) -> dict[int, str]:
        """See `Sender.send`. All learners must call it, with the same engines.

        While a stage is forwarded, the next one arrives from other nodes.

        Raises:
            RuntimeError: another learner did not answer.
        """
        engines, relay = list(engines), self.relay
        failures: dict[int, str] = {}
        last = max([relay.num_rounds, *(len(channel.stages) - 1 for channel in self.channels.values())])
        try:
            for stage in range(last + 1):
                if stage:
                    relay.settle(stage - 1)
                if stage < relay.num_rounds:
                    relay.begin(stage)
                mine = [
                    engine
                    for engine in engines
                    if (channel := self.channels.get(engine)) and stage < len(channel.stages) and channel.stages[stage]
                ]
                failures |= self._hand_on(version, mine, stage)
                relay.forget(stage - 1)
            return failures
        finally:
            self.live.forget()
            self.handed.forget()

    def _hand_on(self, version: int, engines: Sequence[int], stage: int) -> dict[int, str]:
        def send_to(engines: Sequence[int], failed: Failed) -> None:
            deliver({engine: self._delivery(version, engine, stage) for engine in engines}, failed)

        return self._apart(engines, send_to)

    def close(self) -> None:
        """See `Sender.close`."""
        super().close()
        self.relay.close()
