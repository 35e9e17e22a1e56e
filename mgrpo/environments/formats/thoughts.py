"""Where the thoughts of a turn are: between `<think>` and `</think>`, or Mistral's marks."""

from __future__ import annotations

import re

_MARK = re.compile(r"<(/?)think>|\[(/?)THINK\]")
_END = re.compile(r"</think>|\[/THINK\]")


def next_thought(text: str, at: int) -> re.Match[str] | None:
    """The mark that begins the next thought, or one that ends none."""
    return _MARK.search(text, at)


def end_of(text: str, mark: re.Match[str]) -> int:
    """Where the thought ends that a mark begins. A mark that ends none is one by itself, which removes it."""
    return mark.end() if mark[1] or mark[2] else end_of_thought(text, mark.end())


def end_of_thought(text: str, at: int) -> int:
    """Where a thought ends that a position is in."""
    end = _END.search(text, at)
    return end.end() if end else len(text)


def end_of_earlier_thought(text: str) -> tuple[int, int]:
    """The mark that ends a thought begun before the text; (0, 0): none does."""
    mark = _MARK.search(text)
    return mark.span() if mark and (mark[1] or mark[2]) else (0, 0)


def without_thoughts(text: str, *, is_thinking: bool) -> str:
    """`is_thinking`: a thought was begun before the text."""
    at = end_of_thought(text, 0) if is_thinking else end_of_earlier_thought(text)[1]
    kept = []
    while thought := next_thought(text, at):
        kept.append(text[at : thought.start()])
        at = end_of(text, thought)
    return "\n".join([*kept, text[at:]])
