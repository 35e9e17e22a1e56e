"""Regular expressions that labels hold, searched within a time limit.

They have the meaning of Python's `re`. Those that repeat or branch, and so could search for hours in an answer made for
that, are searched by `regex`, which has a timeout.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from mgrpo.rewards.verifier import shown

_LIMIT_S = 0.2
"""Limit of one search in one answer; `regex` takes up to four times as long. Usual searches take microseconds."""
_IS_BOUNDED = re.compile(r"[^*+?{|]*")


class Pattern:
    """A label's regular expression. Searches raise TimeoutError after `_LIMIT_S`."""

    def __init__(self, pattern: str, flags: int) -> None:
        """ValueError for text that is not a regular expression."""
        import regex

        self._limit: dict[str, float] = {}
        try:
            self._compiled: Any = re.compile(pattern, flags)
            if not _IS_BOUNDED.fullmatch(pattern):
                self._compiled = regex.compile(pattern, flags)
                self._limit = {"timeout": _LIMIT_S}
        except (re.error, regex.error, RecursionError, OverflowError) as err:
            raise ValueError(f"{shown(pattern)} in the label is not a regular expression ({err})") from None

    def occurs_in(self, text: str) -> bool:
        return self._compiled.search(text, **self._limit) is not None

    def matches(self, text: str) -> Iterator[re.Match[str]]:
        """Matches that do not overlap, in order."""
        return self._compiled.finditer(text, **self._limit)


@functools.lru_cache(maxsize=1024)
def compiled(pattern: str, flags: int = re.IGNORECASE) -> Pattern:
    """A label's regular expression; ValueError for text that is not one."""
    return Pattern(pattern, flags)
