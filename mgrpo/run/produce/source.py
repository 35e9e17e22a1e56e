"""The source of a rank's batches: on rank 0 the producer, on the others rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mgrpo.config import Config
from mgrpo.layout import Layout
from mgrpo.run.produce.production import Production
from mgrpo.run.produce.step_batch import make_batch
from mgrpo.run.ranks.lead import Lead, Rejoining, Stopped
from mgrpo.run.records import Batch, Evaluation, evaluates_after

T = TypeVar("T")


class Source:
    """Rank 0's source: samples, scores and packs, and sends every rank its slice."""

    def __init__(
        self,
        production: Production,
        lead: Lead,
        config: Config,
        *,
        layout: Layout,
        hidden: int,
        rejoining: Rejoining | None,
    ) -> None:
        """
        Args:
            hidden: width of the model, see `make_batch`.
            rejoining: sends the weights to restarted engines during the wait for a batch; None: not done.
        """
        assert production.producer is not None, "checked: there are training data"
        self.production, self.producer, self.lead = production, production.producer, lead
        self.config, self.layout, self.hidden, self.rejoining = config, layout, hidden, rejoining

    def begin(self, done: int) -> None:
        """Resume sampling after step `done`, unless an evaluation follows that needs the engines to itself."""
        if not self._evaluates_alone(done):
            self.producer.begin()

    def pause(self) -> bool:
        """Pause the engines, for example before the weights change. Collective.

        Returns False if the run was stopped; the engines may still be sampling then.
        """
        try:
            self._run(self.producer.pause)
        except Stopped:
            return False
        return True

    def next(self, step: int, policy_version: int) -> Batch | None:
        """The batch of training step `step`; None when every prompt is solved for good. Collective.

        Args:
            policy_version: the version of the weights that train.
        Raises:
            Stopped: the run was stopped.
        """
        batch = self._run(partial(self._make, policy_version))
        self.producer.hand_over(
            prepare=step < self.config.num_training_steps and not evaluates_after(self.config, step)
        )
        channel = self.lead.channel
        channel.arrays(batch.index)
        own = channel.scatter(self.layout, batch.slices)
        return replace(batch, slices=(), slice=own) if batch.num_sampled else None

    def evaluate(self, done: int) -> Evaluation:
        """Evaluate the held-out prompts after `done` training steps. Collective; raises Stopped as `next` does."""
        if self.config.rollout.inflight_updates:
            self.producer.begin()
        return self._run(partial(self.production.evaluator.evaluate, done))

    def state_dict(self) -> dict[str, Any]:
        """State of the producer, see `Groups.state_dict`, and of the datasets."""
        return {**self.producer.state_dict(), "data": self.production.data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.producer.load_state_dict(state)

    def save_tokenizer(self, folder: Path) -> None:
        """Add the tokenizer to an exported model."""
        self.production.save_tokenizer(folder)

    def _evaluates_alone(self, done: int) -> bool:
        """True if an evaluation follows step `done` that needs the engines to itself."""
        return evaluates_after(self.config, done) and not self.config.rollout.inflight_updates

    def _run(self, work: Callable[[], T]) -> T:
        try:
            return self.lead.work(work, may_stop=True, rejoining=self.rejoining)
        except Stopped:
            self.producer.abort()
            raise

    def _make(self, policy_version: int) -> Batch:
        return make_batch(
            self.producer.dispatcher.wait(self.producer.take()),
            self.config,
            layout=self.layout,
            hidden=self.hidden,
            reward_weights=self.producer.rewarder.weights,
            policy_version=policy_version,
            advantage_fn=self.production.advantage_fn,
        )


class SilentSource:
    """The source of the other ranks, which only wait and receive."""

    def __init__(self, lead: Lead, config: Config, *, layout: Layout, rejoining: Rejoining | None) -> None:
        self.lead, self.config, self.layout, self.rejoining = lead, config, layout, rejoining

    def next(self, step: int, policy_version: int) -> Batch | None:
        """See `Source`."""
        self.lead.follow(self.rejoining)
        channel = self.lead.channel
        batch = Batch(index=channel.arrays(), slice=channel.scatter(self.layout))
        return batch if batch.num_sampled else None

    def begin(self, done: int) -> None:
        """No-op: rank 0 does it."""

    def pause(self) -> bool:
        """See `Source`."""
        try:
            self.lead.follow(self.rejoining)
        except Stopped:
            return False
        return True

    def evaluate(self, done: int) -> None:
        """See `Source`; returns nothing."""
        self.lead.follow(self.rejoining)

    def state_dict(self) -> dict[str, Any]:
        """Empty: rank 0 has the state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op: rank 0 does it."""

    def save_tokenizer(self, folder: Path) -> None:
        """No-op: rank 0 does it."""
