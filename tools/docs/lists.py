"""Lists with the indentation that mkdocs' Markdown wants: four spaces a level, where GitHub is content with the marker's width."""

from __future__ import annotations

import re

_ITEM = re.compile(r"(?! *[-*](?: *[-*])+ *$) *(?:[-*+]|\d+\.) +(?=\S)")
_FENCE = re.compile(r" *(?P<fence>`{3,}|~{3,})")
INDENT = 4


def with_four_spaces(text: str) -> str:
    """The page with everything inside a list item indented by four spaces for each level; code keeps its inner indentation.

    A list that follows text without an empty line gets one.
    """
    lines: list[str] = []
    columns: list[int] = []  # where the contents of the open items begin, outermost first
    fence, shift, after_blank, is_list = "", 0, True, False
    for line in text.split("\n"):
        stripped = line.lstrip(" ")
        indent = len(line) - len(stripped)
        if fence:
            lines.append(_shifted(line, shift))
            is_end = stripped.startswith(fence) and not stripped.strip(fence[0] + " ")
            fence = "" if is_end else fence
            continue
        if not stripped:
            lines.append("")
            after_blank = True
            continue
        item = _ITEM.match(line)
        if item and not after_blank and not is_list:
            lines.append("")
        if after_blank or item:
            is_list = bool(item)
            columns = [column for column in columns if column <= indent]
        depth = sum(column <= indent for column in columns)
        is_placed = not depth or indent == depth * INDENT
        shift = 0 if is_placed else depth * INDENT - columns[depth - 1]
        lines.append(_shifted(line, shift))
        after_blank = False
        if item:
            columns = [*columns, item.end()]
        elif opened := _FENCE.match(line):
            fence = opened["fence"]
    return "\n".join(lines)


def _shifted(line: str, by: int) -> str:
    if by >= 0:
        return " " * by + line if line else line
    return line[min(-by, len(line) - len(line.lstrip(" "))) :]
