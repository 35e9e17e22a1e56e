"""Thoughts in a turn: between `<think>` and `</think>`, or Mistral's marks."""

from __future__ import annotations

import re

_MARK = re.compile(r"<(/?)think>|\[(/?)THINK\]")
_END = re.compile(r"</think>|\[/THINK\]")


def next_thought(text: str, at: int) -> re.Match[str] | None:
    """The next mark: it begins a thought, or ends one that was not begun."""
    return _MARK.search(text, at)


def end_of(text: str, mark: re.Match[str]) -> int:
    """The end of the thought at a mark. A mark that ends a thought which was not begun is a thought by itself, and is removed."""
    return mark.end() if mark[1] or mark[2] else end_of_thought(text, mark.end())


def end_of_thought(text: str, at: int) -> int:
    """The end of the thought around a position."""
    end = _END.search(text, at)
    return end.end() if end else len(text)


def end_of_earlier_thought(text: str) -> tuple[int, int]:
    """The span of the mark that ends a thought begun before the text; (0, 0): no such mark."""
    mark = _MARK.search(text)
    return mark.span() if mark and (mark[1] or mark[2]) else (0, 0)


def without_thoughts(text: str, *, is_thinking: bool) -> str:
    """The text outside thoughts; `is_thinking`: one was begun before the text."""
    at = end_of_thought(text, 0) if is_thinking else end_of_earlier_thought(text)[1]
    kept = []
    while thought := next_thought(text, at):
        kept.append(text[at : thought.start()])
        at = end_of(text, thought)
    return "\n".join([*kept, text[at:]])


def thought_in(text: str, *, is_thinking: bool) -> str:
    """The text of the thoughts, which `without_thoughts` leaves out."""
    first = _END.search(text) if is_thinking else None
    start, at = (
        end_of_earlier_thought(text) if not is_thinking else (first.start(), first.end()) if first else (len(text),) * 2
    )
    found = [text[:start]] if at else []
    while thought := next_thought(text, at):
        at = end_of(text, thought)
        found.append(_MARK.sub("", text[thought.start() : at]))
    return "\n".join(part.strip() for part in found if part.strip())
