"""Rows of the data as environments receive them: JSON, with choices in the columns `tools`, `env_config`, `environment`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_DEPTH = 64
"""Most lists and objects in each other; far more would end the reader by its limit of recursion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """One row's choices; names are call names of tools, or names of environments."""

    tools: frozenset[str] | None
    """Names of the tools that may be called; None: all."""
    environment: str | None
    """The one of several environments of `environment_factory` that the row is for."""
    settings: Mapping[str, Mapping[str, Any]]
    """Settings for environments, by their names."""
    max_calls: int | None
    """The row's `max_steps`, which replaces the run's limit."""

    @property
    def names(self) -> frozenset[str]:
        """All names in `tools` and `env_config`."""
        return (self.tools or frozenset()) | self.settings.keys()


def row_settings(row: Mapping[str, Any]) -> RowSettings:
    """Read a row's choices; an absent column and a null are the same.

    Raises:
        ValueError: a column has another form.
    """
    tools, environment = row.get("tools"), row.get("environment")
    if tools is not None and not _is_list_of(tools, str):
        raise ValueError(f"tools: {tools!r:.100} is not a list of names, such as ['python', 'search']")
    entries, limits = _entries(row.get("env_config"))
    return RowSettings(
        tools=None if tools is None else frozenset(tools),
        environment=environment if isinstance(environment, str) else None,
        settings={entry["env_name"]: _own_settings(entry) for entry in entries},
        max_calls=max(limits, default=None),
    )


def _entries(config: Any) -> tuple[list[Mapping[str, Any]], list[int]]:
    """The entry of `env_config` for each environment, and every `max_steps` in it.

    It is one entry with an `env_name`, a list of entries, or {"env_configs": [...], "max_steps": n}.
    """
    if config is None:
        return [], []
    entries = config
    if isinstance(config, Mapping):
        entries = config.get("env_configs")
        if entries is None:
            entries = [config] if config.get("env_name") is not None else []
    if not _is_list_of(entries, Mapping) or not all(isinstance(entry.get("env_name"), str) for entry in entries):
        raise ValueError(
            f'env_config: {config!r:.200} is neither {{"env_name": ..., "max_steps": ..., ...}} nor a list of such entries'
        )
    holders = [*entries, *([config] if isinstance(config, Mapping) else [])]
    limits = [holder["max_steps"] for holder in holders if holder.get("max_steps") is not None]
    if wrong := [limit for limit in limits if type(limit) is not int or limit < 1]:
        raise ValueError(f"env_config: max_steps={wrong[0]!r} must be a whole number, at least 1")
    return list(entries), limits


def _own_settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry's settings without nulls: rows of one column hold every key that any of them has."""
    ours = ("env_name", "max_steps", "is_text_env")
    return {key: value for key, value in entry.items() if key not in ours and value is not None}


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, kind) for item in value)


def sendable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that JSON can hold."""
    return {name: value for name, value in row.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """True if JSON can hold a value and a worker can read it."""
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
