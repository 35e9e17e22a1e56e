"""What can be sent to a worker as JSON: rows of any data, and what a model wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 64
"""Of lists and objects in each other; far more would end the reader by its limit of recursion."""


def is_plain(value: Any) -> bool:
    """Whether JSON holds it."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        if not level:
            break
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
    try:
        json.dumps(value)
    # An integer of more than 4300 digits is a ValueError.
    except (TypeError, ValueError, RecursionError):
        return False
    return not level


def sendable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that JSON holds."""
    return {name: value for name, value in row.items() if is_plain(value)}
