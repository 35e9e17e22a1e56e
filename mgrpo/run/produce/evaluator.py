"""Evaluations on held-out prompts, in training and in `mgrpo eval`: the same settings, random streams and numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mgrpo.config import Config
from mgrpo.rewards.rewarder import Rewarder, logged_metrics
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.requests import EVALUATION, seed_of
from mgrpo.run.records import Evaluation
from mgrpo.types import Prompt, RewardContext, RolloutGroup


class Evaluator:
    """Samples and scores the held-out prompts, through the producer's dispatcher. For one thread at a time."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        *,
        sources: Sequence[str],
        dispatcher: Dispatcher,
        rewarder: Rewarder,
    ) -> None:
        """
        Args:
            sources: the short name of each prompt's dataset.
        """
        self.config, self.prompts, self.sources = config, prompts, sources
        self.dispatcher, self.rewarder = dispatcher, rewarder

    def evaluate(self, done: int) -> Evaluation:
        """The evaluation after `done` training steps.

        If engines drain before they receive weights, the evaluation has them to itself and uses a fixed random stream; they are then
        reseeded for the next step. Otherwise it runs concurrently with training groups, and every prompt has its own seed.
        """
        start = time.perf_counter()
        rollout, dispatcher = self.config.rollout, self.dispatcher
        context = RewardContext(
            step=done,
            seed=seed_of(self.config.experiment.seed, "rewards", EVALUATION),
            max_tokens=rollout.eval_response_length or rollout.response_length,
        )
        groups = self._sample_alone(done) if dispatcher.fleet.pauses == "drain" else self._sample()
        sampled_s = time.perf_counter() - start
        scored = self.rewarder.score(groups, context)
        return Evaluation(
            groups=scored.groups,
            sources=self.sources,
            generate_s=sampled_s,
            total_s=time.perf_counter() - start,
            reward_metrics=logged_metrics(scored.logged, "eval/"),
            scale=self.rewarder.scale,
        )

    def _sample(self) -> list[RolloutGroup]:
        return self.dispatcher.wait(self.dispatcher.sample_evaluation(self.prompts))

    def _sample_alone(self, done: int) -> list[RolloutGroup]:
        dispatcher, thread = self.dispatcher, self.dispatcher.thread
        dispatcher.wait(thread.submit(dispatcher.pause).result())
        dispatcher.fleet.reseed(EVALUATION)
        asked = dispatcher.sample_evaluation(self.prompts)
        thread.submit(dispatcher.resume)
        groups = dispatcher.wait(asked)
        dispatcher.wait(thread.submit(dispatcher.pause).result())
        dispatcher.fleet.reseed(done + 1)
        return groups
