"""The groups that are out: between the sampler, which gives their prompts, and the step that trains on them.

Pure bookkeeping for one thread; `rollout.stream` has the rule that it follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgrpo.config import Config
from mgrpo.data.sampler import Sampler
from mgrpo.rewards.rubrics.buffer import RubricBuffer, plain_rubric, read_rubric, with_criteria
from mgrpo.rollout.engine import RefusedError
from mgrpo.rollout.requests import seed_of
from mgrpo.rollout.stream import Stream
from mgrpo.run.produce.lessons import Lessons
from mgrpo.run.produce.replay import ReplayBuffer
from mgrpo.run.produce.saved_rollouts import PromptOf, fits, packed, plain_scores, read_scores, unpacked
from mgrpo.types import Prompt, PromptId, RewardContext, RewardScale, RolloutGroup, ScoredGroup

ACTIVE_SAMPLING_ROUNDS = 10
"""A step with active_sampling samples groups of at most this many steps' worth, its own included."""


@dataclass(slots=True, kw_only=True, eq=False)
class Cohort:
    """Groups that were admitted together."""

    numbers: list[int]
    context: RewardContext
    num_there: int = 0
    """Leading groups of `numbers` that are sampled, or need not be."""


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A group that is out: admitted, and not taken by a step."""

    prompt: Prompt | None
    """None: an empty place, because too few prompts are left for a whole step, or because of `refusal`."""
    cohort: Cohort
    refusal: RefusedError | None = None
    """The engines' reason to refuse the prompt."""
    refused_id: PromptId | None = None
    """The refused prompt."""
    sampled: RolloutGroup | None = None
    scored: ScoredGroup | None = None
    is_kept: bool = False
    """True if the group has a signal."""
    excludes: int | None = None
    """Row that is solved for good according to this group."""

    @property
    def awaits_score(self) -> bool:
        """True if the group is to be scored and has no score yet."""
        return self.prompt is not None and self.scored is None

    @property
    def is_judged(self) -> bool:
        """True if its teacher, on an engine or a server, has scored all requested tokens."""
        assert self.scored is not None, "teachers are asked about scored groups"
        return all(
            completion.taught or not any(lesson.prompt is not None for lesson in lessons)
            for completion, lessons in zip(self.scored.group.completions, self.scored.lessons, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """Sampled groups that reward functions receive together."""

    numbers: Sequence[int]
    groups: Sequence[RolloutGroup]
    context: RewardContext


class Groups:
    """All groups that are out, by number."""

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        *,
        prompt: PromptOf,
        scale: RewardScale | None,
        scores_cohorts: bool,
        lessons: Lessons | None = None,
        asks: bool = False,
    ) -> None:
        """
        Args:
            prompt: the training prompt of an id that the sampler gives.
            scale: the scale of the rewards, if they have one.
            scores_cohorts: score groups that were admitted together as one batch, if steps take groups in order.
            lessons: makes the teachers' prompts again for restored groups; None: no teachers.
            asks: scored groups wait for teachers on engines or servers.
        """
        self.lessons, self.asks = lessons, asks
        self.config, self.sampler, self.prompt, self.scale = config, sampler, prompt, scale
        rollout, algorithm = config.rollout, config.algorithm
        wanted = rollout.num_unique_prompts_rollout
        self.stream = Stream(
            group_count=wanted,
            num_steps=config.num_training_steps,
            ahead=rollout.async_steps,
            bound=config.max_age,
            extra=config.num_extra_groups,
            sync_steps=config.engine.weight_sync_steps,
        )
        self.scores_cohorts = scores_cohorts and self.stream.is_ordered
        self.most_returned = (ACTIVE_SAMPLING_ROUNDS - 1) * wanted if algorithm.active_sampling else 0
        """Most groups of a step that may free their slots."""
        self.out: dict[int, Group] = {}
        self.returned: dict[int, Group] = {}
        """Groups that have freed their slots and that no step has reported yet."""
        self.chosen: dict[int, Group] = {}
        """The last result of `choose`, by number."""
        self.left_over: list[PromptId] = []
        """Prompts that a resumed run has to sample again, before new ones."""
        self.num_admitted = self.num_cohorts = 0
        """Groups and cohorts admitted since the last step was taken."""
        self.num_reported = 0
        """`num_admitted` when `choose` found a step."""
        self.buffer = ReplayBuffer(
            algorithm.replay_buffer_size, bound=rollout.max_staleness, seed=config.experiment.seed
        )
        reward = config.reward
        self.rubrics = RubricBuffer(reward.max_active_rubrics if reward.apply_evolving_rubric_reward else None)
        self.before = self._state()

    @property
    def takes_turns(self) -> bool:
        """True if engines sample only while learners wait; results then do not depend on timing."""
        return self.stream.is_ordered and not self.stream.ahead

    @property
    def has_room(self) -> bool:
        """True if groups may be admitted."""
        return self.stream.room > 0

    @property
    def is_complete(self) -> bool:
        """True if every group that is out has been sampled and scored, also by its teacher."""
        return len(self.stream.finished) == len(self.out)

    def admit(self) -> list[int]:
        """Admit groups while there is room, a step's number at a time; returns the numbers of those with a prompt."""
        admitted: list[int] = []
        while (room := self.stream.room) > 0:
            count = min(room, self.stream.group_count)
            again, self.left_over = self.left_over[:count], self.left_over[count:]
            ids = again + self.sampler.take(count - len(again)) if len(again) < count else again
            numbers = self.stream.admit(count)
            cohort = Cohort(numbers=list(numbers), context=self._context(numbers[0], self.stream.updates))
            for number, prompt_id in itertools.zip_longest(numbers, ids):
                prompt = prompt_id and self.rubrics.admitted(self.prompt(prompt_id))
                self.out[number] = Group(prompt=prompt, cohort=cohort)
            for number in numbers[len(ids) :]:
                self.stream.finish(number)
            admitted += numbers[: len(ids)]
            self.num_admitted, self.num_cohorts = self.num_admitted + len(numbers), self.num_cohorts + 1
        return admitted

    def _context(self, first: int, step: int) -> RewardContext:
        """The context of the groups that were admitted with group `first`, after `step` steps."""
        words = (step + 1, self.num_cohorts) if self.takes_turns else ("group", first)
        return RewardContext(
            step=step,
            seed=seed_of(self.config.experiment.seed, "rewards", *words),
            max_tokens=self.config.rollout.response_length,
        )

    def sampled(self, number: int, sampled: RolloutGroup) -> Unscored | None:
        """Record a sampled group; returns the groups that can be scored now."""
        group = self.out[number]
        group.sampled = sampled
        return self._unscored(group.cohort, number)

    def refused(self, number: int, refusal: RefusedError) -> Unscored | None:
        """Record a refused group, whose place stays empty; returns the groups that can be scored now."""
        group = self.out[number]
        assert group.prompt is not None, "a place without a prompt is asked of no engine"
        group.refused_id, group.prompt, group.refusal = group.prompt.id, None, refusal
        self.stream.finish(number)
        return self._unscored(group.cohort, number)

    def _unscored(self, cohort: Cohort, number: int) -> Unscored | None:
        """Groups that can be scored now that this one of the cohort is sampled or refused."""
        if self.scores_cohorts and not self._is_there(cohort):
            return None
        numbers = cohort.numbers if self.scores_cohorts else (number,)
        part = {other: self.out[other] for other in numbers if other in self.out and self.out[other].awaits_score}
        groups = [other.sampled for other in part.values() if other.sampled]
        return Unscored(numbers=list(part), groups=groups, context=cohort.context) if part else None

    def _is_there(self, cohort: Cohort) -> bool:
        """True if every group of a cohort that awaits its score has been sampled."""
        while cohort.num_there < len(cohort.numbers):
            group = self.out.get(cohort.numbers[cohort.num_there])
            if group is not None and group.awaits_score and group.sampled is None:
                return False
            cohort.num_there += 1
        return True

    def scored(self, number: int, scored: ScoredGroup, is_kept: bool) -> None:
        """Record a score. A group without signal frees its slot while replacements are allowed."""
        group = self.out[number]
        group.scored, group.is_kept = scored, is_kept
        if self.awaits_teacher(number):
            pass
        elif is_kept or len(self.returned) >= self.most_returned:
            self.stream.finish(number)
        else:
            self.stream.give_back(number)
            self.returned[number] = self.out.pop(number)
        self._exclude(group)

    def awaits_teacher(self, number: int) -> bool:
        """True if the group has its score and still waits for its teacher."""
        group = self.out.get(number)
        return self.asks and group is not None and bool(group.scored and group.scored.is_taught) and not group.is_judged

    def judged(self, number: int, judged: RolloutGroup) -> None:
        """Record the teacher's scores of a group."""
        group = self.out[number]
        assert group.scored is not None, "teachers are asked about scored groups"
        group.sampled, group.scored = judged, replace(group.scored, group=judged)
        self.stream.finish(number)

    def _exclude(self, group: Group) -> None:
        """Exclude the prompt from sampling if this group shows that it is solved for good."""
        from mgrpo.algo import solved_for_good

        pass_rate = self.config.algorithm.no_resampling_pass_rate
        if pass_rate is None or self.scale is None or group.scored is None or group.prompt is None:
            return
        if solved_for_good(self.scale.shares(group.scored)[None], pass_rate=pass_rate).all():
            before, row = self.sampler.num_excluded, group.prompt.id[1]
            self.sampler.exclude({row})
            group.excludes = row if self.sampler.num_excluded > before else None

    def choose(self) -> list[Group] | None:
        """Groups of the next step and those that freed their slots, in order; None: not enough groups are ready.

        Raises:
            RefusedError: engines refuse all prompts of the step.
        """
        numbers = self.stream.choose()
        if numbers is None:
            return None
        is_empty = all(self.out[number].prompt is None for number in numbers)
        is_over = self.stream.is_ordered or self.is_complete
        if (
            is_empty
            and is_over
            and (refusal := next(filter(None, (self.out[number].refusal for number in numbers)), None))
        ):
            raise refusal
        if is_empty and any(group.prompt for group in self.out.values()):
            return None
        self.chosen = self.returned | {number: self.out[number] for number in numbers}
        self.num_reported = self.num_admitted
        num_dropped = sum(group.prompt is not None and not group.is_kept for group in self.chosen.values())
        self.buffer.draw(num_dropped, steps=self.stream.steps)
        chosen = [group for _, group in sorted(self.chosen.items())]
        self.rubrics.draw([group.scored for group in chosen if group.scored])
        return chosen

    def take(self) -> list[Group]:
        """Remove the groups of `choose`, which the step has received, and return them."""
        chosen = [group for _, group in sorted(self.chosen.items())]
        taken = self.out.keys() & self.chosen
        kept = [
            (own.scored, self.stream.born[n]) for n, own in sorted(self.chosen.items()) if own.is_kept and own.scored
        ]
        self.stream.take(taken)
        self.buffer.add(kept, steps=self.stream.steps)
        self.rubrics.take()
        for number in taken:
            del self.out[number]
        self.returned = {number: group for number, group in self.returned.items() if number not in self.chosen}
        self.chosen, self.num_cohorts = {}, 0
        self.num_admitted -= self.num_reported
        if self.takes_turns:
            self.before = self._state()
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Groups that were not trained on, prompts to sample again, and the position in the data: JSON, and arrays under "rollouts".

        If sampling and training take turns, it is the state before the present step, which is sampled again as a whole.
        """
        # Buffer and rubrics change only when a step is taken, as `before` does.
        state = self.buffer.add_to(self.before if self.takes_turns else self._state())
        return state | {"rubrics": self.rubrics.state_dict()}

    def _state(self) -> dict[str, Any]:
        kept = {number: group for number, group in self.out.items() if self._lasts(number)}
        again = [group for number, group in sorted(self.out.items()) if number not in kept]
        excluded_again = {group.excludes for group in again}
        sampler = self.sampler.state_dict()
        records, arrays = packed({number: group.sampled for number, group in kept.items() if group.sampled})
        return {
            "sampler": sampler | {"excluded": [row for row in sampler["excluded"] if row not in excluded_again]},
            "left_over": [*(group.prompt.id if group.prompt else group.refused_id for group in again), *self.left_over],
            "steps": self.stream.steps,
            "next_number": self.stream.next_number,
            "groups": [
                {
                    "number": number,
                    "born": self.stream.born[number],
                    "prompt": group.prompt and group.prompt.id,
                    "cohort": group.cohort.numbers[0],
                    "step": group.cohort.context.step,
                    "sampled": records.get(number),
                    "scores": group.scored and plain_scores(group.scored),
                    "is_kept": group.is_kept,
                    "excludes": group.excludes,
                    "teacher": group.prompt and self._teacher_of(group.prompt),
                    **plain_rubric(group.prompt, group.scored),
                }
                for number, group in kept.items()
            ],
            "rollouts": arrays,
        }

    def _lasts(self, number: int) -> bool:
        """True if a resumed run restores the group instead of sampling it again.

        In a run that repeats, groups that began with the newest weights are sampled again, with the same result.
        """
        has_just_begun = self.stream.born[number] == self.stream.steps
        group = self.out[number]
        is_empty = group.prompt is None and group.refusal is None
        return is_empty or (group.sampled is not None and not (self.config.repeats and has_just_begun))

    def load_state_dict(self, state: Mapping[str, Any]) -> list[Unscored]:
        """Continue from `state_dict`, with engines that have the weights of its last step; returns the groups to score. Others may wait
        for their teachers (`awaits_teacher`).

        Groups that do not fit the settings of this run are sampled again: groups that would be too old or have another size, and all
        groups if only one of the two runs cuts the tokens to sample from (`top_k`).
        """
        self.sampler.load_state_dict(state["sampler"])
        # States of earlier versions end where a step does.
        self.stream.steps = self.stream.updates = state.get("steps", state.get("step", 0))
        records = state.get("groups", ())
        kept = [record for place, record in enumerate(records) if self._allows(record, state["rollouts"], place)]
        again = [tuple(record["prompt"]) for record in records if record["prompt"] and record not in kept]
        self.left_over = again + [tuple(prompt_id) for prompt_id in state.get("left_over", ())]
        # Groups that are sampled again get their old numbers, if they are the last ones.
        self.stream.next_number = 1 + max((record["number"] for record in kept), default=-1) if records else 0
        if not records:
            self.stream.next_number = max(0, state.get("next_number", 0) - len(self.left_over))
        cohorts: dict[int, Cohort] = {}
        for record in kept:
            self._restore(record, state["rollouts"], cohorts)
        self.buffer.load_state_dict(state, self.prompt, self.config.rollout)
        self.rubrics.load_state_dict(state.get("rubrics", {}))
        self.before = self._state()
        unscored: dict[int, Unscored] = {}
        for number, group in self.out.items():
            if group.sampled and group.awaits_score and (part := self.sampled(number, group.sampled)):
                unscored[part.numbers[0]] = part
        return list(unscored.values())

    def _allows(self, record: Mapping[str, Any], arrays: Mapping[str, Any], place: int) -> bool:
        """True if this run may train on a saved group; `place` is its index among the saved ones, oldest first."""
        own, sampled = self.stream, record["sampled"]
        is_in_time = record["born"] + own.bound >= own.steps + place // own.group_count
        return not self.takes_turns and is_in_time and (sampled is None or fits(sampled, arrays, self.config.rollout))

    def _restore(self, record: Mapping[str, Any], arrays: Mapping[str, Any], cohorts: dict[int, Cohort]) -> None:
        number, prompt_id, first = record["number"], record["prompt"], record["cohort"]
        cohort = cohorts.setdefault(first, Cohort(numbers=[], context=self._context(first, record["step"])))
        cohort.numbers.append(number)
        prompt = prompt_id and with_criteria(self.prompt(tuple(prompt_id)), record)
        group = self.out[number] = Group(prompt=prompt, cohort=cohort)
        self.stream.restore(number, record["born"])
        if group.prompt is None:
            self.stream.finish(number)
            return
        opened = with_criteria(self.prompt(group.prompt.id, record["sampled"].get("opening", "")), record)
        group.sampled = unpacked(opened, record["sampled"], arrays)
        if record.get("teacher") != self._teacher_of(opened):
            untaught = (replace(completion, taught=None) for completion in group.sampled.completions)
            group.sampled = replace(group.sampled, completions=tuple(untaught))
        if record["scores"] is not None:
            scores, rubric = read_scores(record["scores"]), read_rubric(record)
            scored = ScoredGroup(group=group.sampled, scores=scores, rubric=rubric)
            group.scored = self.lessons.added(scored) if self.lessons else scored
            group.is_kept, group.excludes = record["is_kept"] or group.scored.is_taught, record["excludes"]
            if not self.awaits_teacher(number):
                self.stream.finish(number)

    def _teacher_of(self, prompt: Prompt) -> list[Any] | None:
        """Identity of the teacher query, in JSON; stored answers to another query are discarded. None: no query."""
        own = self.config.distillation
        if not self.asks or prompt.teacher < 0:
            return None
        model = own.teachers[prompt.teacher].model
        return [model, own.teacher_temperature, own.teacher_prompt_template, own.num_likeliest]
