"""Links in Markdown, and the anchors that a page offers them, as GitHub makes them; needs only the standard library."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

_FENCE = re.compile(r"^[ ]*(`{3,}|~{3,})[^\n]*\n.*?^[ ]*\1[`~]*[ ]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(
    r"""\]\(\s*<?(?P<inline>[^()<>\s]+)>?(?:\s+"[^"]*")?\s*\)   # [text](target), ![text](target "title")
    |   ^[ ]{0,3}\[[^\]^]+\]:\s+<?(?P<definition>[^\s>]+)       # [label]: target
    |   \b(?:href|src)="(?P<html>[^"]+)"
    """,
    re.MULTILINE | re.VERBOSE,
)
_HEADING = re.compile(r"^#{1,6}[ ]+(.+?)[ ]*#*$", re.MULTILINE)
_ID = re.compile(r"\b(?:id|name)=\"([^\"]+)\"")


@dataclass(frozen=True, slots=True)
class Link:
    """One link, and the place of its target in the text."""

    target: str
    start: int
    end: int

    @property
    def path(self) -> str:
        """The target without the anchor; empty for a link within the page."""
        return unquote(self.target.partition("#")[0])

    @property
    def anchor(self) -> str:
        return unquote(self.target.partition("#")[2])

    @property
    def is_relative(self) -> bool:
        return not re.match(r"[a-z][a-z0-9+.-]*:|//", self.target, re.IGNORECASE)


def links(text: str) -> Iterator[Link]:
    """Every link of a page, including images, but not those in code."""
    for found in _LINK.finditer(_blank(text, _FENCE, _COMMENT, _CODE)):
        group = str(found.lastgroup)
        yield Link(found[group], *found.span(group))


def with_targets(text: str, target: Callable[[Link], str]) -> str:
    """The page with new targets for its links."""
    pieces, end = [], 0
    for link in links(text):
        pieces += [text[end : link.start], target(link)]
        end = link.end
    return "".join(pieces) + text[end:]


def anchors(text: str) -> set[str]:
    """The anchors that a link to the page may name after '#': its headings, and the ids in its HTML."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(_blank(text, _FENCE, _COMMENT)):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found | set(_ID.findall(_blank(text, _FENCE, _COMMENT, _CODE)))


def slug(heading: str) -> str:
    """The anchor of a heading."""
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")


def resolved(link: Link, page: str) -> str:
    """The file that a relative link of `page` leads to, both as paths within the repository; for a folder, its README.md."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link.path)) if link.path else page
    return posixpath.join(path, "README.md") if Path(path, "README.md").is_file() else path


def _blank(text: str, *patterns: re.Pattern[str]) -> str:
    """The text with spaces where a pattern matches, so that positions stay."""
    for pattern in patterns:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    return text
