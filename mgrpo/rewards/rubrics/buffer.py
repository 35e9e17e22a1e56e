"""The criteria that have evolved for each question: which of them are in use, and how a scored group changes them.

State of a run: it changes only with the steps that are taken, by their groups in order, independent of the order in which these were
scored. A prompt gets the criteria that are in use when it is admitted. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mgrpo.rewards.rubrics.criteria import place_of_rubric, question_of, read_criteria, rubric_of
from mgrpo.types import Criterion, JudgedRubric, Prompt, ScoredGroup

MOST_INACTIVE = 100
"""Criteria out of use that are kept of a question, the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolved:
    """The criteria of a question."""

    active: tuple[Criterion, ...] = ()
    """Criteria in use in addition to those of the row, oldest first."""
    inactive: tuple[Criterion, ...] = ()
    """No longer in use; one that is proposed again is."""
    num_persistent: int = 0
    """Criteria of the row."""

    def after(self, rubric: JudgedRubric, max_active: int) -> Evolved:
        """The criteria after a group that was scored by `rubric`.

        New ones are added. Those whose verdicts on the group are all the same become inactive; of more than `max_active` the
        ones whose verdicts deviate most stay (DR Tulu, section 3.2), and of equals the older ones. Those without verdicts on two
        answers stay, unless there are too many by themselves: then the newest.
        """
        new = rubric.criteria[len(rubric.criteria) - (rubric.num_new or 0) :]
        own = {criterion.description for criterion in self.active}
        active = [*self.active, *(criterion for criterion in new if criterion.description not in own)]
        spreads = spread_by_description(rubric)
        of_use = [criterion for criterion in active if spreads.get(criterion.description) != 0.0]
        judged = [criterion for criterion in of_use if criterion.description in spreads]
        best = set(sorted(judged, key=lambda criterion: -spreads[criterion.description])[:max_active])
        if len(of_use) > max_active:
            of_use = [criterion for criterion in of_use if criterion in best or criterion not in judged]
        of_use = of_use[-max_active:]
        again = {criterion.description for criterion in active}
        inactive = [criterion for criterion in self.inactive if criterion.description not in again]
        inactive += [criterion for criterion in active if criterion not in of_use]
        return Evolved(
            active=tuple(of_use),
            inactive=tuple(inactive[-MOST_INACTIVE:]),
            num_persistent=rubric.num_persistent,
        )


def spread_by_description(rubric: JudgedRubric) -> dict[str, float]:
    """Standard deviation of the verdicts by each criterion that has two or more; 0 exactly where they are the same."""
    spreads = {}
    for criterion, verdicts in zip(rubric.criteria, zip(*rubric.verdicts, strict=True), strict=True):
        known = [verdict for verdict in verdicts if not math.isnan(verdict)]
        if len(known) > 1:
            spreads[criterion.description] = float(np.std(known)) if min(known) < max(known) else 0.0
    return spreads


class RubricBuffer:
    """The criteria of all questions that were sampled. For one thread."""

    def __init__(self, max_active: int | None) -> None:
        """
        Args:
            max_active: criteria of a question that stay in use; None: rubrics do not evolve.
        """
        self.max_active = max_active
        self.questions: dict[str, Evolved] = {}
        self.changed: dict[str, Evolved] = {}
        """Questions that the step of the last `draw` changes."""
        self.records: list[dict[str, Any]] = []
        """Changes of that step, for a file."""
        self._metrics: dict[str, float] = {}

    def admitted(self, prompt: Prompt) -> Prompt:
        """The prompt with the criteria by which its group will be judged."""
        if self.max_active is None or (place := place_of_rubric(prompt.verifiers)) < 0:
            return prompt
        try:
            label = rubric_of(prompt.ground_truths[place])
            read_criteria(label)
        except ValueError:  # nor can the verifier read it, which gives no score
            return prompt
        question = question_of(label, prompt.query)
        return replace(prompt, criteria=self.questions.get(question, Evolved()).active)

    def draw(self, groups: Sequence[ScoredGroup]) -> None:
        """Compute the changes by the groups of the next step, in their order; idempotent."""
        self.changed, self.records = {}, []
        if self.max_active is None:
            return
        for group in groups:
            if (rubric := group.rubric) is not None:
                evolved = self.changed.get(rubric.question) or self.questions.get(rubric.question) or Evolved()
                self.changed[rubric.question] = evolved.after(rubric, self.max_active)
                self.records.append(_record(group, rubric, self.changed[rubric.question]))
        self._metrics = evolution_metrics(groups, self.questions | self.changed)

    def take(self) -> None:
        """Apply the changes of `draw`, when the step takes its groups."""
        self.questions |= self.changed
        self.changed = {}

    def metrics(self) -> dict[str, float]:
        """Metrics of the step that `draw` was for; empty where rubrics do not evolve."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return {question: asdict(evolved) for question, evolved in self.questions.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.questions = {
            question: Evolved(
                active=_criteria(own["active"]),
                inactive=_criteria(own["inactive"]),
                num_persistent=own["num_persistent"],
            )
            for question, own in state.items()
            if self.max_active is not None
        }


def evolution_metrics(groups: Sequence[ScoredGroup], questions: Mapping[str, Evolved]) -> dict[str, float]:
    """`evolving_rubrics/...` of a step's groups, and of all questions after it."""
    own = [group for group in groups if group.rubric is not None]
    rubrics = [group.rubric for group in own if group.rubric is not None]
    read = [rubric for rubric in rubrics if rubric.num_new is not None]
    persistent, evolving = _weighted_verdicts(rubrics)
    total_active = sum(len(evolved.active) for evolved in questions.values())
    total_persistent = sum(evolved.num_persistent for evolved in questions.values())
    return {
        "evolving_rubrics/num_new_rubrics": _mean([rubric.num_new or 0 for rubric in read]),
        "evolving_rubrics/num_active_rubrics": _mean([len(rubric.criteria) - rubric.num_persistent for rubric in read]),
        "evolving_rubrics/valid_rate": len(read) / len(rubrics) if rubrics else math.nan,
        "evolving_rubrics/avg_gt_rubrics": _mean([rubric.num_persistent for rubric in read]),
        "evolving_rubrics/skipped": sum(len(rubric.verdicts) for rubric in rubrics if rubric.num_new is None),
        "evolving_rubrics/num_overrides": len({group.group.prompt.id[1] for group in own}),
        "evolving_rubrics/total_active": total_active,
        "evolving_rubrics/total_inactive": sum(len(evolved.inactive) for evolved in questions.values()),
        "evolving_rubrics/total_persistent": total_persistent,
        "evolving_rubrics/total_rubrics_in_use": total_active + total_persistent,
        "evolving_rubrics/avg_evolving_reward": _mean(evolving),
        "evolving_rubrics/std_evolving_reward": float(np.std(evolving)) if evolving else math.nan,
        "evolving_rubrics/avg_persistent_reward": _mean(persistent),
        "evolving_rubrics/std_persistent_reward": float(np.std(persistent)) if persistent else math.nan,
    }


def _weighted_verdicts(rubrics: Sequence[JudgedRubric]) -> tuple[list[float], list[float]]:
    """Weight times verdict by each criterion on each answer, of rows' own criteria and of those that evolve."""
    found: tuple[list[float], list[float]] = ([], [])
    for rubric in rubrics:
        for verdicts in rubric.verdicts:
            for place, (criterion, verdict) in enumerate(zip(rubric.criteria, verdicts, strict=True)):
                if not math.isnan(verdict):
                    found[place >= rubric.num_persistent].append(criterion.weight * verdict)
    return found


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _record(group: ScoredGroup, rubric: JudgedRubric, evolved: Evolved) -> dict[str, Any]:
    num_old = len(rubric.criteria) - (rubric.num_new or 0)
    kinds = ["persistent"] * rubric.num_persistent + ["active"] * (num_old - rubric.num_persistent)
    kinds += ["new"] * (rubric.num_new or 0)
    return {
        "prompt_idx": group.group.prompt.id[1],
        "question": rubric.question,
        "is_proposed": rubric.num_new is not None,
        "responses": [completion.scored_text for completion in group.group.completions],
        "rubrics": [
            {**criterion._asdict(), "kind": kind, "verdicts": [None if math.isnan(v) else v for v in verdicts]}
            for criterion, kind, verdicts in zip(
                rubric.criteria, kinds, zip(*rubric.verdicts, strict=True), strict=True
            )
        ],
        "active_rubrics": [criterion._asdict() for criterion in evolved.active],
        "inactive_rubrics": [criterion._asdict() for criterion in evolved.inactive],
    }


def plain_rubric(prompt: Prompt | None, scored: ScoredGroup | None) -> dict[str, Any]:
    """Criteria and rubric of a waiting group, in JSON."""
    rubric = scored and scored.rubric
    return {"criteria": prompt and prompt.criteria, "rubric": rubric and asdict(rubric)}


def with_criteria(prompt: Prompt, record: Mapping[str, Any]) -> Prompt:
    """The prompt of a group of which `plain_rubric` was saved."""
    criteria = record.get("criteria")
    return prompt if criteria is None else replace(prompt, criteria=_criteria(criteria))


def read_rubric(record: Mapping[str, Any]) -> JudgedRubric | None:
    """The rubric of a group of which `plain_rubric` was saved."""
    plain = record.get("rubric")
    if plain is None:
        return None
    criteria, verdicts = _criteria(plain["criteria"]), tuple(tuple(row) for row in plain["verdicts"])
    return JudgedRubric(**{**plain, "criteria": criteria, "verdicts": verdicts})


def _criteria(rows: Sequence[Sequence[Any]]) -> tuple[Criterion, ...]:
    return tuple(Criterion(*row) for row in rows)
