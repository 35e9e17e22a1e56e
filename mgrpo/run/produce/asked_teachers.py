"""Scored groups that wait for log-probabilities of teachers on engines or servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mgrpo.rollout.teachers import Teachers
from mgrpo.run.produce.group_scoring import Post
from mgrpo.types import Completion, RolloutGroup, ScoredGroup, TeacherScores


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request under way."""

    scored: ScoredGroup
    places: list[tuple[int, slice]]
    """The completion's index and the range of its tokens for each sequence."""
    at: float


class Asking:
    """Requests teacher scores group by group, without waiting in between. Methods are called in the caller's thread."""

    def __init__(
        self,
        teachers: Teachers,
        names: Sequence[str],
        *,
        post: Post,
        done: Callable[[int, RolloutGroup], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """
        Args:
            names: name of each teacher.
            done: called with the number of a group and the group with its scores.
            failed: called once no more scores will arrive.
        """
        self.teachers, self.names, self.post, self.done = teachers, names, post, done
        self.asked: dict[int, _Asked] = {}
        self.waits: dict[str, list[float]] = {}
        """Seconds of each answer since `take_metrics`, by teacher."""
        teachers.listen(lambda err: post(partial(failed, err)))

    def add(self, number: int, scored: ScoredGroup) -> None:
        """Request the scores of a group with at least one teacher prompt."""
        sequences: list[tuple[np.ndarray, int]] = []
        places: list[tuple[int, slice]] = []
        for place, (completion, lessons) in enumerate(zip(scored.group.completions, scored.lessons, strict=True)):
            for lesson, own in zip(lessons, _spans(completion), strict=True):
                if lesson.prompt is not None:
                    tokens = np.concatenate([lesson.prompt, completion.tokens[own]])
                    sequences.append((tokens, len(lesson.prompt)))
                    places.append((place, own))
        self.asked[number] = _Asked(scored=scored, places=places, at=time.perf_counter())
        teacher = scored.group.prompt.teacher
        self.teachers.ask(
            teacher, sequences, lambda answers: self.post(partial(self._answered, number, teacher, answers))
        )

    @property
    def waited_for(self) -> str:
        """Teachers with open requests, each with its number of groups; "": none."""
        teachers = [asked.scored.group.prompt.teacher for asked in list(self.asked.values())]
        return " and ".join(
            f"the teacher {self.names[teacher]} (groups: {teachers.count(teacher)})"
            for teacher in sorted(set(teachers))
        )

    def take_metrics(self) -> dict[str, float]:
        """Mean seconds of the answers since the last call."""
        waits, self.waits = self.waits, {}
        return {f"time/teachers/{name}/avg_wait": float(np.mean(seconds)) for name, seconds in waits.items()}

    def _answered(self, number: int, teacher: int, answers: Sequence[TeacherScores]) -> None:
        asked = self.asked.pop(number)
        self.waits.setdefault(self.names[teacher], []).append(time.perf_counter() - asked.at)
        group = asked.scored.group
        completions = list(group.completions)
        for (place, own), scores in zip(asked.places, answers, strict=True):
            completions[place] = _with_scores(completions[place], own, scores)
        self.done(number, replace(group, completions=tuple(completions)))


def _spans(completion: Completion) -> list[slice]:
    """The tokens of each branch."""
    branches = completion.trajectory.branches if completion.trajectory else ()
    return [slice(branch.start, branch.end) for branch in branches] or [slice(0, len(completion.tokens))]


def _with_scores(completion: Completion, own: slice, scores: TeacherScores) -> Completion:
    """Add a teacher's scores of the tokens `own`, without those of tokens that were not sampled."""
    assert len(scores.logprobs) == own.stop - own.start, "a score for each token that was asked about"
    is_sampled = completion.loss_mask[own]
    places = np.zeros(len(completion.tokens), np.bool_)
    places[own] = is_sampled
    whole = scores.part(is_sampled).spread(places)
    if completion.taught is not None:
        # Branches come in order.
        whole = TeacherScores.joined([completion.taught.part(slice(own.start)), whole.part(slice(own.start, None))])
    return replace(completion, taught=whole)
