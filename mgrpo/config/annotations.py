"""Metadata of the settings: the values they may hold, the reason, what they need to have an effect, and peers with the same name."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NewType

JSONObject = NewType("JSONObject", str)
"""The text of a JSON object; a YAML file may hold a mapping for it."""
NO_ENTRIES = JSONObject("{}")
"""The empty object."""
Rule = Callable[..., Iterator[str]]
"""A function that yields one sentence per violation. Its parameters are the settings that it reads, see `rules.Reading`."""


FINITE_TOO = " and finite"
"""What a limit says of numbers, of which whole ones are always finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The finite numbers a field may hold; other values of the field, such as none or auto, are not judged."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` lies in the range; false for nan and for integers beyond every float."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and abs(value) <= sys.float_info.max

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf:
            return f"{'above' if self.low_open else 'at least'} {self.low}{FINITE_TOO}"
        return f"in {'(' if self.low_open else '['}{self.low}, {self.high}{')' if self.high_open else ']'}"


FINITE = Range()
POSITIVE = Range(low=0, low_open=True)
NOT_NEGATIVE = Range(low=0)
ONE_OR_MORE = Range(low=1)
BELOW_ONE = Range(low=0, high=1, high_open=True)
UP_TO_ONE = Range(low=0, high=1)
SHARE = Range(low=0, high=1, low_open=True)


@dataclass(frozen=True, slots=True)
class Form:
    """The texts a field may hold."""

    words: str
    holds: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a field's values are limited, where the limit alone does not say it."""

    text: str


@dataclass(frozen=True, slots=True)
class Needs:
    """A condition without which a setting has no effect; a run that is given the setting without it is warned.

    Fields that share one object are named in one warning.
    """

    condition: str
    """In the words of the warning."""
    holds: Callable[..., bool]
    """Its parameters are settings, as those of a `Rule`."""


class Peer(Enum):
    """Another trainer that has a setting of the same name."""

    OPEN_INSTRUCT = "Open Instruct"
    TRL = "TRL"
    MEGATRON = "Megatron"


OPEN_INSTRUCT = Peer.OPEN_INSTRUCT
TRL = Peer.TRL
MEGATRON = Peer.MEGATRON


def shown(value: object) -> str:
    """A value as a user would write it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "nothing"
    return f"{value:g}" if isinstance(value, float) else str(value)
