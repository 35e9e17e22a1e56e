"""The program in a completion: one of its fenced blocks, or the whole text where it holds no complete one.

Texts are written by a model, and this runs in the trainer's process: they are searched line by line and never parsed.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import NamedTuple

_RUN = re.compile(r"`{3,}|^[ \t]*~{3,}")
_WORD_OF_INFO = re.compile(r"[\s{.]*([\w.+#-]*)")
_PYTHON = re.compile(r"i?py(?:thon)?(?:[23](?:\.\d+)?)?", re.IGNORECASE)
_INDENT = re.compile(r"[ \t]*")
# At the first column only: tests call no methods by their name alone.
_DEFINED = re.compile(
    r"^(?:(?:async[ \t]+)?def|class)[ \t]+(?P<name>\w+)|^(?P<variable>\w+)[ \t]*(?::[^=\n]*)?=(?!=)", re.MULTILINE
)
_RUNS_SOMETHING = re.compile(r"\w\(|^[ \t]*(?:def|class|import|from)\s", re.MULTILINE)
# Columns that a fence may stand further right than the one that it closes, as in CommonMark.
_MORE_INDENT = 3


class _Block(NamedTuple):
    language: str
    """The first word of the info string."""
    text: str


class _Opening(NamedTuple):
    fence: str
    indent: int
    language: str


def extract_program(text: str, called: Set[str] = frozenset()) -> str:
    """The program of a text; "" where all of its blocks are of other languages.

    Candidates are blocks marked as Python, and unmarked ones that look like a program; without any, all unmarked ones.
    The last of those that define the most names of `called` is chosen.
    """
    blocks = _blocks(text)
    if not blocks:
        return text
    said = [bool(_PYTHON.fullmatch(block.language)) for block in blocks]
    unsaid = [block.text for block in blocks if not block.language]
    programs = [
        block.text
        for block, is_python in zip(blocks, said, strict=True)
        if is_python or (not block.language and _RUNS_SOMETHING.search(block.text))
    ]
    candidates = programs or unsaid or [""]
    # Of equal ones `max` returns the first.
    return max(reversed(candidates), key=lambda program: len(called & _defined(program)))


def has_block(text: str) -> bool:
    """True if the text contains a complete block of any language."""
    return bool(_blocks(text))


def _defined(program: str) -> set[str]:
    return {match["name"] or match["variable"] for match in _DEFINED.finditer(program)}


def _blocks(text: str) -> list[_Block]:
    """The complete blocks of a text; text between two fences of one line is a block as well."""
    blocks: list[_Block] = []
    opening: _Opening | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        runs = list(_RUN.finditer(line))
        if opening is None:
            for first, second in zip(runs[::2], runs[1::2], strict=False):
                blocks.append(_inline(line[first.end() : second.start()]))
            opening, lines = _opened(line, runs[-1]) if len(runs) % 2 else None, []
        elif not runs or not _closes(line, runs, opening):
            lines.append(line)
        else:
            before = line[: runs[0].start()]
            blocks.append(_Block(opening.language, _dedented([*lines, before], opening.indent).strip()))
            # A fence with an info string begins the next block.
            opening, lines = _opened(line, runs[0]) if line[runs[0].end() :].strip() else None, []
    return blocks


def _opened(line: str, run: re.Match[str]) -> _Opening:
    match = _WORD_OF_INFO.match(line, run.end())
    assert match is not None  # it may be empty
    return _Opening(run[0].strip(), _indent(line), match[1])


def _closes(line: str, runs: list[re.Match[str]], opening: _Opening) -> bool:
    run, fence = runs[0], runs[0][0].strip()
    if len(runs) > 1 or not fence.startswith(opening.fence):
        return False
    before = line[: run.start()]
    if not before.strip():
        return _indent(line) <= opening.indent + _MORE_INDENT
    return not before[-1].isspace() and not line[run.end() :].strip()


def _inline(text: str) -> _Block:
    word, _, rest = text.lstrip().partition(" ")
    return _Block(word, rest.strip()) if _PYTHON.fullmatch(word) and rest.strip() else _Block("", text.strip())


def _indent(line: str) -> int:
    match = _INDENT.match(line)
    return len(match[0]) if match else 0


def _dedented(lines: list[str], most: int) -> str:
    """The lines without up to `most` columns of their indentation, which is the fence's."""
    return "\n".join(line[min(most, _indent(line)) :] for line in lines)
