"""Arguments of constraints: the kinds of a label's kwargs. A checker's annotations define them, and `bound` reads these.

An argument that is missing, unknown or of the wrong kind makes the label unreadable: a ValueError, and so no score.
Nothing is drawn at random or guessed in its place.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import NewType

from mgrpo.rewards.verifier import shown

Whole = NewType("Whole", int)
"""A whole number."""
Count = NewType("Count", int)
"""A whole number, 0 or more."""
Position = NewType("Position", int)
"""A whole number, 1 or more."""
Percentage = NewType("Percentage", float)
"""A number, 0 or more."""
Text = NewType("Text", str)
"""Any text."""
Filled = NewType("Filled", str)
"""Text that is not empty."""
Word = NewType("Word", str)
"""Text without the white space around it, not empty."""
FirstWord = NewType("FirstWord", str)
"""A `Word`, or a list whose first element is one."""
Character = NewType("Character", str)
"""One character."""
Words = NewType("Words", "list[str]")
"""A list of text, not empty."""
Texts = NewType("Texts", "list[str]")
"""A list of text."""
Relation = NewType("Relation", str)
"""`less than` or `at least`."""
Quantifier = NewType("Quantifier", str)
"""`at least`, `around` or `at most`."""

Checker = Callable[..., bool]


def bound(name: str, checker: Checker, kwargs: Mapping[str, object]) -> Callable[[str], bool]:
    """The checker called `name` with its arguments, read and checked."""
    known, takes_any = _parameters(checker)
    unknown = [key for key in kwargs if key not in known]
    if unknown and not takes_any:
        expected = ", ".join(known) or "none"
        raise ValueError(f"{name}: unknown argument {', '.join(map(str, unknown))}; expected: {expected}")
    arguments: dict[str, object] = {}
    for key, (kind, is_required) in known.items():
        if key in kwargs:
            try:
                arguments[key] = _READERS[kind](kwargs[key])
            except ValueError as err:
                raise ValueError(f"{name}: {key}={shown(kwargs[key])} {err}") from None
        elif is_required:
            raise ValueError(f"{name}: the label lacks the argument {key}; expected: {', '.join(known)}")
    return functools.partial(checker, **arguments)


def holds(relation: Relation, found: int, threshold: int) -> bool:
    """True if `found` is less than the threshold, or at least as large, by `relation`."""
    return found < threshold if relation == "less than" else found >= threshold


@functools.cache
def _parameters(checker: Checker) -> tuple[dict[str, tuple[object, bool]], bool]:
    """The checker's arguments, each with its kind and True if required; and True if it takes any others."""
    kinds = typing.get_type_hints(checker)
    known: dict[str, tuple[object, bool]] = {}
    takes_any = False
    for parameter in list(inspect.signature(checker).parameters.values())[1:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_any = True
        else:
            known[parameter.name] = (kinds[parameter.name], parameter.default is inspect.Parameter.empty)
    return known, takes_any


def _whole(value: object, least: int | None = None) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("is not a whole number")
    if least is not None and value < least:
        raise ValueError(f"is less than {least}")
    return value


def _percentage(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError("is not a number of 0 or more")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("is not text")
    return value


def _filled(value: object) -> str:
    if not _text(value):
        raise ValueError("is empty")
    return _text(value)


def _word(value: object) -> str:
    return _filled(_text(value).strip())


def _first_word(value: object) -> str:
    return _word(value[0] if isinstance(value, list) and value else value)


def _character(value: object) -> str:
    if len(_text(value)) != 1:
        raise ValueError("is not one character")
    return _text(value)


def _texts(value: object) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(element, str) for element in value):
        raise ValueError("is not a list of text")
    return list(value)


def _words(value: object) -> list[str]:
    if not _texts(value):
        raise ValueError("is an empty list")
    return _texts(value)


def _one_of(choices: tuple[str, ...], value: object) -> str:
    if value not in choices:
        raise ValueError(f"is none of {', '.join(map(repr, choices))}")
    return _text(value)


_READERS: dict[object, Callable[[object], object]] = {
    Whole: _whole,
    Count: functools.partial(_whole, least=0),
    Position: functools.partial(_whole, least=1),
    Percentage: _percentage,
    Text: _text,
    Filled: _filled,
    Word: _word,
    FirstWord: _first_word,
    Character: _character,
    Words: _words,
    Texts: _texts,
    Relation: functools.partial(_one_of, ("less than", "at least")),
    Quantifier: functools.partial(_one_of, ("at least", "around", "at most")),
}
