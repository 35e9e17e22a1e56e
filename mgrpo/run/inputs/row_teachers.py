"""The teacher of each row, the text that teachers read in place of a question, and every problem with either."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from string import Formatter
from typing import TYPE_CHECKING

from mgrpo.config import Config
from mgrpo.config.distillation import Distillation, template_problems
from mgrpo.data.rows import VERIFIERS

if TYPE_CHECKING:
    from mgrpo.data.mixture import Mixture

COLUMN = "teacher"
"""Column with the name of a row's teacher."""
NONE = "none"
"""Value of that column in a row without a teacher."""
QUESTION, ANSWER, FEEDBACK = OWN = ("prompt", "answer", "feedback")
"""Placeholders that are not columns."""
MOST_SHOWN = 8
"""Most names in a message."""


class RowTeachers:
    """Finds the teacher of a row. Upper and lower case are equal."""

    def __init__(self, distillation: Distillation) -> None:
        names = [teacher.name.lower() for teacher in distillation.teachers]
        self.places = {name: place for place, name in enumerate(names) if name}
        self.unnamed = names.index("") if "" in names else -1
        """Teacher of rows that match no name; -1: none."""

    def of(self, columns: Mapping[str, object], source: str) -> int:
        """Index of a row's teacher in `Distillation.teachers`; -1: none.

        The column `teacher` names it; else it is the first teacher named like a verifier in `dataset`, else like the row's file or
        dataset, else the one without a name.

        Args:
            columns: the row's columns except the prompt.
            source: the row's file or dataset.
        Raises:
            ValueError: the column `teacher` holds something else.
        """
        named = columns.get(COLUMN)
        if named is not None:
            return self._named(named)
        return next((self.places[name] for name in _names(columns, source) if name in self.places), self.unnamed)

    def _named(self, named: object) -> int:
        place = self.places.get(named.lower()) if isinstance(named, str) else None
        if place is None and named != NONE:
            known = ", ".join(self.places) or "none has a name"
            raise ValueError(
                f"column {COLUMN} has {named!r}, which is no teacher of the run ({known}); add it to teacher_model_name_or_path as "
                f"NAME:MODEL, write {NONE} where a row has no teacher, or rename the column if it means something else"
            )
        return -1 if place is None else place


@dataclass(frozen=True, slots=True)
class TeacherTemplate:
    """A text with placeholders for the question and for values that only the teacher reads."""

    parts: tuple[tuple[str, str | None], ...]
    """Literal texts, each with the name of the placeholder after it, None at the end."""

    @classmethod
    def read(cls, text: str) -> TeacherTemplate:
        """Parse `teacher_prompt_template`, whose form has been checked."""
        return cls(tuple((literal, name) for literal, name, _, _ in Formatter().parse(text)))

    @property
    def names(self) -> set[str]:
        """Names of all placeholders."""
        return {name for _, name in self.parts if name is not None}

    @property
    def columns(self) -> set[str]:
        """Names of the placeholders that are columns of the row."""
        return self.names.difference(OWN)

    def text(self, values: Mapping[str, str]) -> str:
        """The text with a value for each placeholder."""
        return "".join(literal + ("" if name is None else values[name]) for literal, name in self.parts)


def text_of(value: object) -> str:
    """A column's value in a template: text unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def row_teacher_problems(config: Config, train: Mixture) -> list[str]:
    """Problems of teachers that rows name and the run lacks, of unused teachers, and of the template."""
    distillation = config.distillation
    if not distillation.distills or not len(train):
        return []
    problems = list(_template_problems(distillation.teacher_prompt_template, train.columns))
    teachers = RowTeachers(distillation)
    if len(distillation.teachers) == 1 and teachers.unnamed == 0 and COLUMN not in train.columns:
        return problems
    return problems + _row_problems(distillation, teachers, train)


def template_remarks(
    config: Config, columns: Collection[str], *, longest: int, limit: int, num_tokens: Callable[[str], int]
) -> Iterator[str]:
    """Notes for the user on limits of the template.

    Args:
        columns: columns of the training rows.
        longest: tokens of the longest prompt.
        limit: most tokens of a sequence that every teacher accepts.
        num_tokens: counts the tokens of a text.
    """
    text = config.distillation.teacher_prompt_template
    if text is None or not config.distillation.distills:
        return
    template = TeacherTemplate.read(text)
    for name in sorted(template.names.intersection(columns, (ANSWER, FEEDBACK))):
        what = "another completion of the group" if name == ANSWER else "what was said of the completion"
        yield f"teacher_prompt_template: {{{name}}} is {what}, not the column {name}; to show that, rename it"
    response = config.rollout.response_length
    own = num_tokens("".join(literal for literal, _ in template.parts)) + (response if ANSWER in template.names else 0)
    if (needed := longest + own + response) > limit:
        parts = f"a prompt of {longest} tokens, {own} of the template{' with an answer' if ANSWER in template.names else ''}"
        yield (
            f"a teacher reads up to {limit} tokens (pack_length={config.parallel.pack_length}, its positions), and {parts} and a completion of "
            f"{response} can have {needed}: what is longer is not taught (distillation/untaught/too_long)"
        )


def _template_problems(text: str | None, columns: Collection[str]) -> Iterator[str]:
    # The rules report a malformed template.
    if text is None or any(template_problems(text)):
        return
    for name in sorted(TeacherTemplate.read(text).columns.difference(columns)):
        yield (
            f"teacher_prompt_template has {{{name}}}, which no row has; expected {{{QUESTION}}}, {{{ANSWER}}}, {{{FEEDBACK}}} or a "
            f"column: {_listed(columns)}; a brace of the text itself is written twice, {{{{ and }}}}"
        )


def _row_problems(distillation: Distillation, teachers: RowTeachers, train: Mixture) -> list[str]:
    asked: set[int] = set()
    unknown: dict[str, tuple[str, int]] = {}
    names: dict[str, None] = {}
    for source, origin, columns in train.rows():
        try:
            asked.add(teachers.of(columns, source))
        except ValueError as err:
            first, count = unknown.get(str(err), (origin, 0))
            unknown[str(err)] = first, count + 1
        # The name of a file, not its path.
        names.update(dict.fromkeys(name for name in _names(columns, source) if name != source.lower()))
    problems = [
        f"{origin}: {problem}" + (f" ({count - 1:,} more such rows)" if count > 1 else "")
        for problem, (origin, count) in unknown.items()
    ]
    for place, (name, model) in enumerate(distillation.teachers):
        if place not in asked and not unknown:
            what = f"no row asks for {name}; rows have" if name else "every row has another teacher; they have"
            entry = f"{name}:{model}" if name else model
            problems.append(f"teacher_model_name_or_path={entry}: {what} the names {_listed(names)}")
    return problems


def _names(columns: Mapping[str, object], source: str) -> list[str]:
    """Names that may select a row's teacher, in lower case."""
    verifiers = columns.get(VERIFIERS)
    given = verifiers if isinstance(verifiers, list) else [verifiers]
    path = PurePath(source)
    return [name.lower() for name in (*given, source, path.name, path.stem) if isinstance(name, str)]


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
    return ", ".join(found[:MOST_SHOWN]) + more
