"""Where the values of a configuration come from, and what is to be said about how they were understood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The history of a `Config`; it takes no part in comparing two of them."""

    preset: str = "mgrpo"
    """The preset that gave what neither file nor flag gives."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Of every setting that is not at its default: "flag", "file F", "preset P", "argument", "alias A (flag)", "derived"."""
    notes: tuple[str, ...] = ()
    """What the user should know: each alias that was used, each name without effect."""
    problems: tuple[str, ...] = ()
    """Mistakes that reading found; `validate` lists them before its own."""
    unsound: frozenset[str] = frozenset()
    """Settings whose value could not be understood; they hold defaults and are not judged."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """Values that follow from others and were given all the same: `validate` compares."""
