"""Constraints on text that a response repeats (IFEval and Open Instruct)."""

from __future__ import annotations

from mgrpo.rewards.constraints.label_arguments import Filled, Position, Whole, Word
from mgrpo.rewards.constraints.patterns import compiled

_SEPARATOR = "******"


def prompt_then_answer(response: str, *, prompt_to_repeat: Filled) -> bool:
    return response.strip().lower().startswith(_folded(prompt_to_repeat))


def prompt_copied(response: str, *, prompt_to_repeat: Filled) -> bool:
    return _folded(response) == _folded(prompt_to_repeat)


def prompt_copied_often(response: str, *, prompt_to_repeat: Filled, N: Position) -> bool:
    copies = response.split(_SEPARATOR)
    return len(copies) == N and all(_folded(copy) == _folded(prompt_to_repeat) for copy in copies)


def span_copied(response: str, *, prompt_to_repeat: Filled, n_start: Whole, n_end: Whole) -> bool:
    """The indices count characters; the end is left out."""
    return _folded(response) == _folded(prompt_to_repeat[n_start:n_end])


def two_responses(response: str) -> bool:
    parts = [part.strip() for part in response.split(_SEPARATOR)]
    if not all(parts[1:-1]):
        return False
    filled = [part for part in parts if part]
    return len(filled) == 2 and filled[0] != filled[1]


def phrase_varied(response: str, *, phrase: Word, small_n: Position) -> bool:
    """The phrase `small_n` times, from its first to its last word, each time with one word changed."""
    words = phrase.split()
    found = _between(words[0], words[-1], response)
    if len(found) != small_n:
        return False
    for variant in (text.split() for text in found):
        if len(variant) != len(words):
            return False
        if sum(1 for new, old in zip(variant, words, strict=True) if new != old) != 1:
            return False
    return True


def _between(first: str, last: str, response: str) -> list[str]:
    """Shortest runs of text on one line, from the one word to the other; both are regular expressions."""
    span = compiled(f"{first} .*? {last}", 0)
    end_word = compiled(f"(?= ({last}))", 0)
    found: list[str] = []
    for line in response.split("\n"):
        # Behind the last place where the end could be, each `first` would search the rest of the line without a match.
        ends = [match.end(1) for match in end_word.matches(line)]
        if ends:
            found += [match.group() for match in span.matches(line[: max(ends)])]
    return found


def _folded(text: str) -> str:
    return text.strip().lower()
