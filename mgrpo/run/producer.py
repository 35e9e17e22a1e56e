"""From the next prompts to scored groups: data, engines and rewards of the training steps. No torch, no other ranks.

A group goes from the sampler to an engine, to the rewards, and to a step, or gives its place back; `rollout.stream` says when
it may begin and which step takes it. All of it happens in the dispatcher's thread, beside the training.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mgrpo.config import Config
from mgrpo.data.sampler import Sampler
from mgrpo.processes.background import Background
from mgrpo.processes.stopwatch import Stopwatch
from mgrpo.rewards.rewarder import Rewarder, logged_metrics
from mgrpo.rollout.collect import seed_of
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.stream import Stream
from mgrpo.types import Prompt, PromptId, RewardContext, RolloutGroup, ScoredBatch, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The scored groups of one step, in the order of their prompts."""

    groups: list[ScoredGroup]
    """To train on."""
    dropped: list[ScoredGroup]
    """Sampled, but not worth training on."""
    generate_s: float = 0.0
    """Seconds for which the learners waited for engines."""
    score_s: float = 0.0
    """Seconds for which they then waited for scores."""
    engine_s: float = 0.0
    """Seconds for which engines had work since the last step was handed over."""
    num_admitted: int = 0
    """Groups that have begun since then."""
    reward_metrics: Mapping[str, float] = field(default_factory=dict)
    """What judges have cost so far, and what reward functions have logged in this step."""
    num_excluded: int = 0
    """Prompts that were found solved for good in this step, and are not sampled again."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Cohort:
    """Groups that were admitted together, which reward functions see together where steps are taken in order."""

    numbers: Sequence[int]
    context: RewardContext


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """A group that is out."""

    prompt: Prompt | None
    """None: so few prompts are left that the step is short."""
    cohort: _Cohort
    sampled: RolloutGroup | None = None
    scored: ScoredGroup | None = None
    is_kept: bool = False
    excludes: int | None = None
    """The row that it has shown to be solved for good."""


class Producer:
    """Turns prompts into scored groups. Its methods may be called from any thread."""

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        *,
        prompt: Callable[[PromptId], Prompt],
        dispatcher: Dispatcher,
        rewarder: Rewarder,
    ) -> None:
        """
        Args:
            prompt: the training prompt of an id that the sampler gives.
        """
        self.config, self.sampler, self.prompt = config, sampler, prompt
        self.dispatcher, self.rewarder = dispatcher, rewarder
        rollout, algorithm = config.rollout, config.algorithm
        wanted = rollout.num_unique_prompts_rollout
        self.stream = Stream(
            group_count=wanted,
            num_steps=config.num_training_steps,
            ahead=rollout.async_steps,
            bound=config.max_age,
            extra=config.num_extra_groups,
        )
        self.most_returned = (algorithm.active_sampling_max_rounds - 1) * wanted if algorithm.active_sampling else 0
        """Groups that may give their place back in a step."""
        self.groups: dict[int, _Group] = {}
        """All that are out, by number."""
        self.returned: dict[int, _Group] = {}
        """Those that gave their place back since the last step was handed over."""
        self.unsent: list[int] = []
        """Of a resumed run: those that are to be sampled again."""
        self.unscored: list[tuple[RewardContext, list[int]]] = []
        """What waits for its score, in the parts that reward functions see together."""
        self.is_scoring = False
        self.logged: dict[str, list[float]] = {}
        self.taken: list[int] | None = None
        """The groups of the next step, which has not been handed over."""
        self.taking: Future[Rollouts] | None = None
        self.asked_at = self.answered_at = 0.0
        self.failure: Exception | None = None
        self.is_running = False
        """Whether the engines sample, and more may be admitted."""
        self.num_admitted = 0
        """Since the last step was handed over."""
        self.num_rounds = 0
        """Of this step, where sampling and training take turns."""
        self.busy = Stopwatch()
        """Runs while engines have work."""
        self.scoring = Background("scoring")
        self.thread = dispatcher.thread
        dispatcher.on_failure = self._fail
        self.before = self._state()
        """Where sampling and training take turns: the state before the step that has not been handed over."""

    @property
    def takes_turns(self) -> bool:
        """Whether engines sample only while learners wait; then the time that anything takes has no influence."""
        return self.stream.is_ordered and not self.stream.ahead

    def begin(self) -> None:
        """The engines have the weights of the last step: sample. Returns at once, and may be called again."""
        self.dispatcher.post(self._begin)

    def take(self) -> Future[Rollouts]:
        """The groups of the next step; `Dispatcher.wait` waits for them. With active sampling others replace those left out.

        Neither groups nor dropped ones: every prompt is solved for good.
        """
        taking: Future[Rollouts] = Future()
        self.dispatcher.post(partial(self._ask, taking, time.perf_counter()))
        return taking

    def hand_over(self, *, prepare: bool) -> None:
        """The groups of `take` have been given to the learners: a resumed run is not given them again.

        Args:
            prepare: where sampling and training take turns, queue the next step's prompts in the engines. Not before an
                evaluation, which would sample them.
        """
        self.thread.submit(partial(self._hand_over, prepare=prepare)).result()

    def pause(self) -> None:
        """Have the engines sample no more, and wait until they do not."""
        self.dispatcher.wait(self.thread.submit(self._pause).result())

    def abort(self) -> None:
        """End sampling for good; what is waited for fails with an EngineError."""
        self.dispatcher.fleet.abort()

    def _begin(self) -> None:
        if self.is_running:
            return
        self.is_running, self.dispatcher.holds_training = True, False
        self.stream.update()
        self._send(self.unsent)
        self.unsent = []
        self._admit()
        self._resume()

    def _ask(self, taking: Future[Rollouts], asked_at: float) -> None:
        self.taking, self.asked_at = taking, asked_at
        self._begin()
        self._advance()

    def _pause(self) -> Future[None]:
        self.is_running, self.dispatcher.holds_training = False, True
        return self.dispatcher.pause()

    def _resume(self) -> None:
        self.dispatcher.resume()
        self.busy.run(not self.dispatcher.is_idle)

    def _admit(self) -> None:
        """Begin with as many groups as there is room for, a step's worth at a time."""
        while (room := self.stream.room) > 0:
            count = min(room, self.stream.group_count)
            ids = self.sampler.take(count)
            numbers = self.stream.admit(count)
            cohort = _Cohort(numbers=numbers, context=self._context(numbers))
            for number, prompt_id in itertools.zip_longest(numbers, ids):
                self.groups[number] = _Group(prompt=prompt_id and self.prompt(prompt_id), cohort=cohort)
            for number in numbers[len(ids) :]:
                self.stream.finish(number)
            self._send(numbers[: len(ids)])
            self.num_rounds += 1
            self.num_admitted += count
        self._advance()

    def _send(self, numbers: Sequence[int]) -> None:
        prompts = [(number, self.groups[number].prompt) for number in numbers]
        self.dispatcher.send(
            [self.dispatcher.for_training(prompt, partial(self._sampled, number)) for number, prompt in prompts if prompt]
        )

    def _context(self, numbers: Sequence[int]) -> RewardContext:
        step = self.stream.updates
        words = (step + 1, self.num_rounds) if self.takes_turns else ("group", numbers[0])
        return RewardContext(
            step=step,
            seed=seed_of(self.config.experiment.seed, "rewards", *words),
            max_tokens=self.config.rollout.response_length,
        )

    def _sampled(self, number: int, sampled: RolloutGroup) -> None:
        self.answered_at = time.perf_counter()
        self.busy.run(not self.dispatcher.is_idle)
        group = self.groups[number]
        group.sampled = sampled
        part = [number]
        if self.rewarder.functions and self.stream.is_ordered:
            part = [other for other in group.cohort.numbers if self._awaits_score(other)]
            if any(self.groups[other].sampled is None for other in part):
                return
        self.unscored.append((group.cohort.context, part))
        # Groups that came with one answer are scored together.
        self.dispatcher.post(self._score)

    def _awaits_score(self, number: int) -> bool:
        group = self.groups.get(number)
        return group is not None and group.prompt is not None and group.scored is None

    def _score(self) -> None:
        """Give the rewarder, when it has nothing to do, what there is; functions get each part by itself."""
        if self.is_scoring or not self.unscored:
            return
        self.is_scoring = True
        parts = self.unscored[:1] if self.rewarder.functions else self.unscored
        self.unscored = self.unscored[len(parts) :]
        context = parts[0][0]
        numbers = [number for _, part in parts for number in part]
        sampled = [group for group in (self.groups[number].sampled for number in numbers) if group]
        scored = self.scoring.submit(partial(self.rewarder.score, sampled, context))
        scored.add_done_callback(lambda done: self.dispatcher.post(partial(self._scored, numbers, done)))

    def _scored(self, numbers: Sequence[int], done: Future[ScoredBatch]) -> None:
        self.is_scoring = False
        batch = done.result()
        for name, values in batch.logged.items():
            self.logged.setdefault(name, []).extend(values)
        for number, scored, is_kept in zip(numbers, batch.groups, self._keep(batch.groups), strict=True):
            group = self.groups[number]
            group.scored, group.is_kept = scored, is_kept
            if is_kept or len(self.returned) >= self.most_returned:
                self.stream.finish(number)
            else:
                self.stream.give_back(number)
                self.returned[number] = self.groups.pop(number)
        self._exclude(numbers)
        self._score()
        self._refill()
        self._advance()

    def _refill(self) -> None:
        """Others in the place of groups that gave theirs back."""
        if not self.is_running or self.stream.room <= 0:
            return
        if not self.takes_turns:
            self._admit()
        elif self.stream.finished.issuperset(self.groups):
            # What the engines sample together depends on nothing but the order of the prompts.
            self.dispatcher.pause()
            self._admit()
            self._resume()

    def _advance(self) -> None:
        """Give the learners the next step's groups, if they wait and the groups are there."""
        if self.taking is None or self.taking.done():
            return
        if self.failure is not None:
            self.taking.set_exception(self.failure)
            return
        self.taken = self.stream.choose()
        if self.taken is None:
            return
        chosen = self.returned | {number: self.groups[number] for number in self.taken}
        scored = [(group.scored, group.is_kept) for _, group in sorted(chosen.items()) if group.scored is not None]
        now = time.perf_counter()
        generate_s = max(0.0, self.answered_at - self.asked_at)
        self.taking.set_result(
            Rollouts(
                groups=[group for group, is_kept in scored if is_kept],
                dropped=[group for group, is_kept in scored if not is_kept],
                generate_s=generate_s,
                score_s=now - self.asked_at - generate_s,
                engine_s=self.busy.seconds,
                num_admitted=self.num_admitted,
                reward_metrics=self.rewarder.metrics() | logged_metrics(self.logged),
                num_excluded=sum(group.excludes is not None for group in chosen.values()),
            )
        )

    def _hand_over(self, *, prepare: bool) -> None:
        assert self.taken is not None, "taken before"
        self.stream.take(self.taken)
        for number in self.taken:
            del self.groups[number]
        self.taken, self.taking, self.returned, self.logged, self.num_rounds = None, None, {}, {}, 0
        self.num_admitted = 0
        self.busy.reset()
        if self.takes_turns:
            # What the engines hold of the old weights is dropped while the learners train.
            self.dispatcher.pause()
            self.is_running = False
            self.before = self._state()
            if prepare:
                self.stream.update()
                self._admit()

    def _fail(self, err: Exception) -> None:
        self.failure = self.failure or err
        self._advance()

    def _keep(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """Which groups have something to learn from."""
        from mgrpo.algo import has_spread

        algorithm = self.config.algorithm
        if not algorithm.filter_zero_std_samples:
            return [True] * len(groups)
        if algorithm.advantage_normalization_type != "gdpo":
            return has_spread(np.stack([group.rewards for group in groups])).tolist()
        # Functions that differ may add up to the same reward; each has an advantage of its own.
        by_function = [
            np.array([[score.parts[name] for score in group.scores] for group in groups])
            for name in self.rewarder.weights
        ]
        return np.any([has_spread(values) for values in by_function], axis=0).tolist()

    def _exclude(self, numbers: Sequence[int]) -> None:
        """Do not sample again what these groups have shown to be solved for good."""
        from mgrpo.algo import solved_for_good

        pass_rate, scale = self.config.algorithm.no_resampling_pass_rate, self.rewarder.scale
        if pass_rate is None or scale is None:
            return
        groups = [self.groups.get(number) or self.returned[number] for number in numbers]
        shares = np.array([scale.shares(group.scored) for group in groups if group.scored])
        before = self.sampler.num_excluded
        for group, is_solved in zip(groups, solved_for_good(shares, pass_rate=pass_rate), strict=True):
            if is_solved and group.prompt:
                self.sampler.exclude({group.prompt.id[1]})
                if self.sampler.num_excluded > before:
                    before, group.excludes = self.sampler.num_excluded, group.prompt.id[1]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to be given what this one has not trained on, in JSON.

        Prompts that are queued or being sampled are sampled again.
        """
        return self.thread.submit(lambda: self.before if self.takes_turns else self._state()).result()

    def _state(self) -> dict[str, Any]:
        return {
            "sampler": self.sampler.state_dict(),
            "stream": self.stream.state_dict(),
            "dispatcher": self.dispatcher.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, before the first `begin`."""
        self.sampler.load_state_dict(state["sampler"])
        self.stream.load_state_dict(state["stream"])
        self.dispatcher.load_state_dict(state["dispatcher"])
        self.before = self._state()
