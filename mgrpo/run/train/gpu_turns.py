"""Turns of learners and engines that share devices: only one of them holds the memory at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.run.ranks.lead import Lead, Stopped
from mgrpo.run.train.learner import Learner


class GpuTurns:
    """Memory turns of learners and engines. Every rank makes one, in the learners' turn; all methods are collective."""

    def __init__(self, learner: Learner, lead: Lead, fleet: Fleet | None) -> None:
        """
        Args:
            fleet: the engines, asleep, on rank 0.
        """
        self.learner, self.lead, self._fleet = learner, lead, fleet
        self.is_learners = True

    def learners(self) -> None:
        """Give the memory to the learners: the engines release theirs and keep their requests, then the learners restore theirs."""
        if not self.is_learners:
            self.lead.run(self._sleep)
            self._take_room()
            self.is_learners = True

    def engines(self, send: Callable[[], None]) -> None:
        """Give the memory to the engines; meanwhile `send` wakes the engines' weights and sends the policy's.

        Tensors that a sync does not read are released before it, so that the device never holds both halves whole; the engines
        allocate their cache when they sample.
        """
        if self.is_learners:
            self.make_room()
            try:
                send()
            except Stopped:
                # The run was stopped while it waited for engines.
                self._take_room()
                raise
            self.learner.policy.offload()
            self._wait_for_all()
            self.is_learners = False

    def make_room(self) -> None:
        """Release the learners' memory except the tensors that a sync reads, before engines wake their weights."""
        for model in self.learner.models.untrained:
            model.offload()
        self.learner.policy.offload(keep_boxes=True)
        self._wait_for_all()

    def _take_room(self) -> None:
        for model in (self.learner.policy, *self.learner.models.untrained):
            model.restore()

    def _sleep(self) -> None:
        assert self._fleet is not None, "rank 0 has the engines"
        self._fleet.sleep()

    def _wait_for_all(self) -> None:
        dist.barrier(group=self.learner.host_group)
