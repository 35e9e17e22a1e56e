"""Check of each row's label by its verifier before the start: an unreadable label would never get a score."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mgrpo.rewards.registry import find
from mgrpo.rewards.verifier import shown

LIMIT_S = 60.0
"""Seconds that the check may take, enough for a hundred thousand labels or more."""


@dataclass(slots=True, kw_only=True)
class _Found:
    """Labels with the same message of a verifier."""

    origin: str
    """"file:line" of the first."""
    said: str
    """The verifier's message about the first."""
    label: object
    count: int = 0


def looked_at(
    labels: Iterable[tuple[str, str, object]], verifier_of: Callable[[str], str], *, limit_s: float = LIMIT_S
) -> tuple[list[str], list[str]]:
    """A problem for each verifier that cannot read labels, and notes on parts of labels that verifiers ignore.

    Args:
        labels: "file:line", verifier in the row, ground truth.
        verifier_of: maps the row's verifier to the scoring one, after `remap_verifier`.
    """
    unread: dict[str, _Found] = {}
    noted: dict[tuple[str, str], _Found] = {}
    totals: dict[str, int] = {}
    until, about_time = time.monotonic() + limit_s, []
    for origin, given, label in labels:
        if time.monotonic() > until:
            about_time = [f"the labels after {origin} were not looked at, because that takes more than {limit_s:g} s"]
            break
        name = verifier_of(given)
        totals[name] = totals.get(name, 0) + 1
        try:
            if said := find(name).check_label(label):
                _count(noted, (name, said), origin, said, label)
        # A verifier may be the user's, and a label may be nested deeper than Python's stack.
        except Exception as err:
            _count(
                unread, name, origin, str(err) if isinstance(err, ValueError) else f"{type(err).__name__}: {err}", label
            )
    problems = [
        f"{found.origin}: the verifier {name} cannot read the label: {found.said}{_others(found.count)}"
        for name, found in unread.items()
    ]
    notes = [
        f"verifier {name}: {found.count} of {totals[name]} labels {said}; the first is {shown(found.label)} ({found.origin})"
        for (name, said), found in noted.items()
    ]
    return problems, notes + about_time


def _count(kept: dict[Any, _Found], key: Any, origin: str, said: str, label: object) -> None:
    kept.setdefault(key, _Found(origin=origin, said=said, label=label)).count += 1


def _others(count: int) -> str:
    return f"; so it is with {count:,} labels" if count > 1 else ""
