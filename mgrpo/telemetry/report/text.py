"""Untrusted text and numbers on the page: escaped, visible, and nothing but text."""

from __future__ import annotations

import html
import json
import unicodedata
from collections.abc import Iterable, Sequence

SHOWN_CHARACTERS = 4000
"""Characters of one text that are shown, unless its place shows fewer."""
_IN_SCRIPTS = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})


def text(value: object, *, limit: int | None = SHOWN_CHARACTERS) -> str:
    """Any value as HTML text or as a quoted attribute: no markup, and nothing invisible."""
    return html.escape(visible(str(value), limit=limit), quote=True)


def visible(value: str, *, limit: int | None = SHOWN_CHARACTERS) -> str:
    """The text with invisible characters, and those that change the reading direction, as their code points."""
    more = f" ... {len(value) - limit} more characters" if limit is not None and len(value) > limit else ""
    start = value[:limit] if more else value
    if start.isprintable():
        return start + more
    return "".join(map(_visible, start)) + more


def _visible(char: str) -> str:
    is_hidden = unicodedata.category(char)[0] == "C" or char in "\u2028\u2029"
    return f"\\u{ord(char):04x}" if is_hidden and char not in "\n\t\u200d" else char


def script_json(value: object) -> str:
    """JSON that is also safe inside a `<script type="application/json">`."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPTS)


def shown(value: object) -> str:
    """A value for readers: numbers shortened, lists as words."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def percent(share: object) -> str:
    """A share of 1 as a percentage; empty for anything but a number."""
    return f"{100 * share:.1f} %" if isinstance(share, (int, float)) else ""


SHORT = 16
"""The longest text of a cell that stays on one line."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself if the page is too narrow for it."""
    cells = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td{_class(cell)}>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>"


def _class(cell: str) -> str:
    is_number = cell.removesuffix(" %")[-1:].isdigit() and cell.lstrip("-+")[:1].isdigit() and " - " not in cell
    names = ["number"] * is_number + ["short"] * (len(cell) <= SHORT)
    return f" class='{' '.join(names)}'" if names else ""
