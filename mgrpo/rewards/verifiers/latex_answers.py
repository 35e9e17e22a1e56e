r"""Finding the final answer of a mathematical text: `\boxed{}`, Minerva's sentence, the last formula.

Texts are what a model wrote, so every search here is linear in their length, whatever they hold.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED_BOX = "\\boxed "
_SENTENCE = "Final Answer: The final answer is"
_SENTENCE_END = re.compile(". I hope it is correct.")


def last_boxed(text: str) -> str | None:
    r"""Contents of the last `\boxed{...}` whose braces close; None without one."""
    span = _last_braced_box(text)
    return None if span is None else text[slice(*span)]


def boxed_answer(text: str) -> str | None:
    r"""Contents of the last `\boxed{...}`, or of a later `\boxed ...`, which ends at the next dollar sign."""
    span = _last_braced_box(text)
    start = text.rfind(_UNBRACED_BOX)
    unbraced = text[start + len(_UNBRACED_BOX) :].partition("$")[0].strip() if start >= 0 else ""
    if unbraced and unbraced[0] != "{" and (span is None or span[0] < start):
        return unbraced
    return None if span is None else text[slice(*span)]


def minerva_answer(text: str) -> str | None:
    """The x of "Final Answer: The final answer is x. I hope it is correct."; the end of the text may replace the last
    five words. None without that sentence.
    """
    # What Minerva's regular expression accepts, dots included: the first line that has it, up to the nearest end.
    for line in f"{text}I hope it is correct.".split("\n"):
        _, sentence, rest = line.partition(_SENTENCE)
        if sentence and (end := _SENTENCE_END.search(rest)):
            return rest[: end.start()].strip()
    return None


def last_formula(text: str) -> str | None:
    """The text between the last two dollar signs; None where there are fewer."""
    before, dollar, _ = text.rpartition("$")
    _, opening, formula = before.rpartition("$")
    return formula if dollar and opening else None


def _last_braced_box(text: str) -> tuple[int, int] | None:
    # Braces are paired in one pass over the text, so that a thousand unclosed boxes cost no more than one.
    boxes = {match.end() for match in _BOX.finditer(text)}
    if not boxes:
        return None
    last = (-1, -1)
    open_braces: list[int] = []
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(match.end())
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start in boxes and start > last[0]:
                last = (start, match.start())
    return last if last[0] >= 0 else None
