"""Scoring groups by rubrics that evolve: criteria are proposed for a group, and it is judged by them at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mgrpo.rewards.compose import Verifies
from mgrpo.rewards.remote_endpoint import RemoteScorer
from mgrpo.rewards.rubrics.criteria import place_of_rubric, question_of, read_criteria, rubric_of, weighted_mean
from mgrpo.rewards.rubrics.proposals import Proposer
from mgrpo.rewards.trajectory_rewards import is_lost
from mgrpo.rewards.verifier import Item
from mgrpo.types import Criterion, JudgedRubric, Prompt, RolloutGroup, ScoredGroup


def score_evolving(
    groups: Sequence[RolloutGroup],
    score: Callable[[Sequence[RolloutGroup], Verifies], list[ScoredGroup]],
    *,
    pool: Verifies,
    remote: RemoteScorer,
) -> list[ScoredGroup]:
    """Score by `score`; each prompt with `criteria` is judged by them, those of its row and those proposed for the group.

    Args:
        score: scores groups by their verifiers, which it calls through the given pool.
        pool: calls all verifiers.
        remote: calls the model that proposes.
    """
    places = [place for place, group in enumerate(groups) if group.prompt.criteria is not None]
    rubrics = [_rubric(groups[place].prompt) for place in places]
    answers = [[c.scored_text for c in groups[place].completions if not is_lost(c)] for place in places]
    proposed = remote.ask(Proposer, lambda proposer: proposer.propose_all(rubrics, answers)) if rubrics else []
    extended = list(groups)
    for place, rubric, new in zip(places, rubrics, proposed, strict=True):
        extended[place] = _labelled(groups[place], rubric if new is None else _extended(rubric, new))
    judge = _ByCriterion(pool=pool)
    scored = score(extended, judge)
    verdicts = iter(judge.verdicts)
    found = [replace(own, group=group) for own, group in zip(scored, groups, strict=True)]
    for place in places:
        judged = _label(extended[place].prompt)
        assert isinstance(judged, JudgedRubric)
        none = (math.nan,) * len(judged.criteria)
        given = tuple(none if is_lost(completion) else next(verdicts) for completion in groups[place].completions)
        found[place] = replace(found[place], rubric=replace(judged, verdicts=given))
    return found


def _rubric(prompt: Prompt) -> JudgedRubric:
    """The criteria of the row, and those that have evolved so far."""
    label = rubric_of(_label(prompt))
    persistent = read_criteria(label)
    return JudgedRubric(
        question=question_of(label, prompt.query),
        criteria=(*persistent, *(prompt.criteria or ())),
        num_persistent=len(persistent),
        num_new=None,
    )


def _extended(rubric: JudgedRubric, proposed: Sequence[Criterion]) -> JudgedRubric:
    """The rubric with the proposed criteria, except those whose words it has already."""
    known, new = {_words(criterion) for criterion in rubric.criteria}, []
    for criterion in proposed:
        if (words := _words(criterion)) not in known:
            known.add(words)
            new.append(criterion)
    return replace(rubric, criteria=(*rubric.criteria, *new), num_new=len(new))


def _words(criterion: Criterion) -> str:
    return " ".join(criterion.description.lower().split())


def _label(prompt: Prompt) -> object:
    return prompt.ground_truths[place_of_rubric(prompt.verifiers)]


def _labelled(group: RolloutGroup, rubric: JudgedRubric) -> RolloutGroup:
    """The group with this in place of its rubric's label."""
    truths = list(group.prompt.ground_truths)
    truths[place_of_rubric(group.prompt.verifiers)] = rubric
    return replace(group, prompt=replace(group.prompt, ground_truths=tuple(truths)))


@dataclass(slots=True, kw_only=True)
class _ByCriterion:
    """Requests a verdict by each criterion of an evolving rubric from the pool, and keeps the verdicts."""

    pool: Verifies
    verdicts: list[tuple[float, ...]] = field(default_factory=list)
    """Verdicts on each answer to such a prompt, in order: one per criterion."""

    def verify_many(self, items: Sequence[Item]) -> list[float]:
        """The score of every item, in order; NaN where one verdict could not be given."""
        parts = [_parts(item) for item in items]
        given = iter(self.pool.verify_many([part for own in parts for part in own]))
        return [self._score(item, tuple(next(given) for _ in own)) for item, own in zip(items, parts, strict=True)]

    def _score(self, item: Item, given: tuple[float, ...]) -> float:
        rubric = item.answer.ground_truth
        if not isinstance(rubric, JudgedRubric):
            return given[0]
        self.verdicts.append(given)
        return weighted_mean(rubric.criteria, given)


def _parts(item: Item) -> list[Item]:
    """The item, or for a rubric that evolves one with each criterion alone, whose score is the verdict."""
    rubric = item.answer.ground_truth
    if not isinstance(rubric, JudgedRubric):
        return [item]
    return [
        Item(
            item.verifier,
            replace(
                item.answer,
                ground_truth={"query": rubric.question, "rubrics": [{"description": criterion.description}]},
            ),
        )
        for criterion in rubric.criteria
    ]
