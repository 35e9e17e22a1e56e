"""What the teacher of a scored group reads before each completion: what the policy read, or the template's text with more than that.

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
"""The tokens of a prompt with another text of the user's last message, which the function makes of the present one."""
TOLERANCE = 1e-8


class Lessons:
    """Makes the lessons of groups. For one thread at a time."""

    def __init__(
        self, template: TeacherTemplate | None, *, reworded: Reworded, scale: RewardScale | None, longest: Sequence[int]
    ) -> None:
        """
        Args:
            template: None: teachers read what the policy reads.
            scale: of the rewards, if they have one.
            longest: for each teacher the tokens of a prompt by the template and the completion after it, at most.
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
        """Of what was sampled after `context`, with the teacher's prompt, or the reason for which there is none."""
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
        """What stands for the placeholders except that of the question; or the reason for which a completion is not taught."""
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
        """One array for all completions with equal values: it travels once."""
        key = tuple(values.values())
        if key not in made:
            made[key] = self.reworded(prompt, lambda question: template.text({**values, QUESTION: question}))
        return made[key]

    def _answer(self, scored: ScoredGroup, number: int) -> str:
        """The text of the right answer with the highest reward among the other completions, the first of equals; "" without one."""
        completions, rewards = scored.group.completions, scored.rewards
        others = [
            place
            for place in np.flatnonzero(right_answers(scored, self.scale)).tolist()
            if place != number and completions[place].sampled_text.strip()
        ]
        best = max(others, key=lambda place: (rewards[place], -place), default=None)
        return "" if best is None else completions[best].sampled_text


def lesson_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """How many completions, or branches of them, teachers judge, and how many they do not, and why; empty without teachers."""
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
    """`[group]` bool: completions with the highest reward that their row can have, whatever the penalty for length takes off.

    Where rewards have no such scale, because functions or an environment decide, those with the highest reward of the group, if
    others have less.
    """
    if scale is not None and scale.highest(scored) > 0:
        return scale.shares(scored) >= 1 - TOLERANCE
    rewards = np.where(np.isnan(scored.rewards), -np.inf, scored.rewards)
    known = rewards[np.isfinite(rewards)]
    if not len(known) or known.max() - known.min() <= TOLERANCE * abs(known.max()):
        return np.zeros(len(rewards), np.bool_)
    return rewards >= known.max() - TOLERANCE * abs(known.max())


def feedback(score: Score, completion: Completion) -> str:
    """What was said of a completion: what reward functions recorded as `feedback` (`log_extra`), or else what a tool or an environment
    answered last; "" if nothing was."""
    recorded = [
        text_of(value) if isinstance(value, str) else str(value)
        for name, value in score.extras.items()
        # That of a second function stands under its name.
        if name.rpartition("/")[2] == FEEDBACK and value is not None
    ]
    if text := "\n".join(recorded).strip():
        return text
    messages = completion.trajectory.messages if completion.trajectory else ()
    answers = [str(message["content"]) for message in messages if message["role"] in ("tool", "user")]
    return answers[-1].strip() if answers else ""


def _parts(prompt: Prompt, completion: Completion) -> list[tuple[np.ndarray, int]]:
    """What the policy read before each branch of a completion, and the number of its tokens."""
    branches = completion.trajectory.branches if completion.trajectory else ()
    return [(branch.prompt_tokens, branch.end - branch.start) for branch in branches] or [
        (prompt.tokens, len(completion.tokens))
    ]
