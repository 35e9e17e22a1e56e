"""Teacher prompts of a scored group's completions: the policy's own context, or the text of a template.

Pure: equal groups give equal lessons, so that a resumed run makes those of saved groups again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mgrpo.run.inputs.row_teachers import ANSWER, FEEDBACK, QUESTION, TeacherTemplate, text_of
from mgrpo.types import Completion, Lesson, Prompt, RewardScale, Score, ScoredGroup

Reworded = Callable[[Prompt, Callable[[str], str]], np.ndarray]
"""Tokenizes a prompt after the function has rewritten the text of the user's last message."""
TOLERANCE = 1e-8


class Lessons:
    """Builds the teacher prompts of groups. For one thread at a time."""

    def __init__(
        self, template: TeacherTemplate | None, *, reworded: Reworded, scale: RewardScale | None, longest: Sequence[int]
    ) -> None:
        """
        Args:
            template: None: teachers read the policy's context.
            scale: scale of the rewards, if they have one.
            longest: for each teacher, most tokens of a templated prompt with its completion.
        """
        self.template, self.reworded, self.scale, self.longest = template, reworded, scale, longest

    def added(self, scored: ScoredGroup) -> ScoredGroup:
        """The group with its lessons; unchanged if its prompt has no teacher."""
        prompt = scored.group.prompt
        if prompt.teacher < 0:
            return scored
        made: dict[tuple[str, ...], np.ndarray] = {}
        lessons = []
        for number, completion in enumerate(scored.group.completions):
            head: np.ndarray | str = prompt.tokens
            if self.template is not None:
                values = self._values(self.template, scored, number)
                head = values if isinstance(values, str) else self._prompt(self.template, prompt, values, made)
            lessons.append(tuple(self._lesson(head, prompt, *part) for part in _parts(prompt, completion)))
        return replace(scored, lessons=tuple(lessons))

    def _lesson(self, head: np.ndarray | str, prompt: Prompt, context: np.ndarray, num_tokens: int) -> Lesson:
        """Lesson of the tokens sampled after `context`: the teacher's prompt, or the reason for its absence."""
        if not num_tokens:
            return Lesson(prompt=None)
        if isinstance(head, str):
            return Lesson(prompt=None, untaught=head)
        if self.template is None:
            return Lesson(prompt=context)
        if not np.array_equal(context[: len(prompt.tokens)], prompt.tokens):
            return Lesson(prompt=None, untaught="branch")
        rest = context[len(prompt.tokens) :]
        if len(head) + len(rest) + num_tokens > self.longest[prompt.teacher]:
            return Lesson(prompt=None, untaught="too_long")
        return Lesson(prompt=np.concatenate([head, rest]) if len(rest) else head)

    def _values(self, template: TeacherTemplate, scored: ScoredGroup, number: int) -> dict[str, str] | str:
        """Values of the placeholders except the question's, or the reason why the completion is not taught."""
        columns, values = scored.group.prompt.columns, {}
        for name in sorted(template.columns):
            if columns.get(name) is None:
                return "no_column"
            values[name] = text_of(columns[name])
        if ANSWER in template.names:
            values[ANSWER] = self._answer(scored, number)
        if FEEDBACK in template.names:
            values[FEEDBACK] = feedback(scored.scores[number], scored.group.completions[number])
        return next((f"no_{name}" for name in (ANSWER, FEEDBACK) if values.get(name) == ""), values)

    def _prompt(
        self,
        template: TeacherTemplate,
        prompt: Prompt,
        values: Mapping[str, str],
        made: dict[tuple[str, ...], np.ndarray],
    ) -> np.ndarray:
        """Teacher prompt; one array for all completions with equal values, so that it is sent once."""
        key = tuple(values.values())
        if key not in made:
            made[key] = self.reworded(prompt, lambda question: template.text({**values, QUESTION: question}))
        return made[key]

    def _answer(self, scored: ScoredGroup, number: int) -> str:
        """Text of the right answer with the highest reward among the other completions (the first of equals); "": none."""
        completions, rewards = scored.group.completions, scored.rewards
        others = [
            place
            for place in np.flatnonzero(right_answers(scored, self.scale)).tolist()
            if place != number and completions[place].sampled_text.strip()
        ]
        best = max(others, key=lambda place: (rewards[place], -place), default=None)
        return "" if best is None else completions[best].sampled_text


def lesson_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Numbers of completions or branches that teachers score and do not score, by reason; empty without teachers."""
    lessons = [lesson for group in groups for own in group.lessons for lesson in own]
    untaught = Counter(lesson.untaught for lesson in lessons if lesson.untaught)
    if not lessons:
        return {}
    return {
        "distillation/asked": sum(lesson.prompt is not None for lesson in lessons),
        "distillation/untaught": untaught.total(),
        **{f"distillation/untaught/{reason}": count for reason, count in untaught.items()},
    }


def right_answers(scored: ScoredGroup, scale: RewardScale | None) -> np.ndarray:
    """`[group]` bool: completions with the highest possible reward of their row, before the penalty for length.

    Rewards of functions or an environment have no such scale: then completions with the group's highest reward, if others have
    less.
    """
    if scale is not None and scale.highest(scored) > 0:
        return scale.shares(scored) >= 1 - TOLERANCE
    rewards = np.where(np.isnan(scored.rewards), -np.inf, scored.rewards)
    known = rewards[np.isfinite(rewards)]
    if not len(known) or known.max() - known.min() <= TOLERANCE * abs(known.max()):
        return np.zeros(len(rewards), np.bool_)
    return rewards >= known.max() - TOLERANCE * abs(known.max())


def feedback(score: Score, completion: Completion) -> str:
    """Feedback on a completion: `feedback` recorded by reward functions (`log_extra`), else the last answer of a tool or an
    environment; "": none."""
    recorded = [
        text_of(value) if isinstance(value, str) else str(value)
        for name, value in score.extras.items()
        # A second function's feedback has its name as prefix.
        if name.rpartition("/")[2] == FEEDBACK and value is not None
    ]
    if text := "\n".join(recorded).strip():
        return text
    messages = completion.trajectory.messages if completion.trajectory else ()
    answers = [str(message["content"]) for message in messages if message["role"] in ("tool", "user")]
    return answers[-1].strip() if answers else ""


def _parts(prompt: Prompt, completion: Completion) -> list[tuple[np.ndarray, int]]:
    """For each branch of a completion, the policy's context and the number of tokens."""
    branches = completion.trajectory.branches if completion.trajectory else ()
    return [(branch.prompt_tokens, branch.end - branch.start) for branch in branches] or [
        (prompt.tokens, len(completion.tokens))
    ]
