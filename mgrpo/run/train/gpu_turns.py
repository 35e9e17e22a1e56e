"""Learners and engines on the same devices: which of them have the memory, in turns."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.run.ranks.lead import Lead, Stopped
from mgrpo.run.train.learner import Learner


class GpuTurns:
    """Every rank makes one, in the learners' turn, and makes the same calls; all are collective."""

    def __init__(self, learner: Learner, lead: Lead, fleet: Fleet | None) -> None:
        """
        Args:
            fleet: the engines, asleep, on rank 0.
        """
        self.learner, self.lead, self._fleet = learner, lead, fleet
        self.is_learners = True

    def learners(self) -> None:
        """The engines release their memory and keep what they have begun; then the learners take theirs again."""
        if not self.is_learners:
            self.lead.run(self._sleep)
            self._take_room()
            self.is_learners = True

    def engines(self, send: Callable[[], None]) -> None:
        """The learners release their memory; in between, `send` wakes the engines' weights and gives them the policy's.

        What a sync does not read goes before it, so that the device never holds both halves whole; the engines take memory for
        their cache when they sample.
        """
        if self.is_learners:
            self.make_room()
            try:
                send()
            except Stopped:
                # It was still waiting for engines.
                self._take_room()
                raise
            self.learner.policy.offload()
            self._wait_for_all()
            self.is_learners = False

    def make_room(self) -> None:
        """Before engines wake their weights: the learners keep what a sync reads."""
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
