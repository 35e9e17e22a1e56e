"""Files that others read during a run: its state in `status.json`, those of its engines in `engines.jsonl`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from mgrpo.telemetry.files import take_over, write_whole

STATUS, ENGINES = "status.json", "engines.jsonl"
State = Literal["running", "finished", "stopped", "failed"]


class Status(TypedDict):
    """The object in status.json."""

    state: State
    cause: str
    """Reason why the run ended before its last step; "" otherwise, and if it was stopped."""


def write_status(folder: Path, state: State, cause: str = "") -> None:
    """Record the state of the run in a folder."""
    write_whole(folder / STATUS, json.dumps(Status(state=state, cause=cause)) + "\n")


def read_status(folder: Path) -> Status | None:
    """The last recorded state of the run in a folder; None: the file is missing or unreadable."""
    try:
        found = json.loads((folder / STATUS).read_text(encoding="utf-8"))
        state = found["state"]
        return Status(state=state, cause=str(found["cause"])) if state in get_args(State) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


class EngineStates:
    """Writes engines.jsonl: a line with the states of all engines ("engines"), then one with those that differ ("changed").

    A file may have several lines of all: each run that continues it begins with one.

    Args:
        resumed_after: the step after which this run continues the run that wrote the file; its later lines are removed.
            None: a new run.
    """

    def __init__(self, folder: Path, *, resumed_after: int | None = None) -> None:
        self.path = folder / ENGINES
        self._last: dict[int, dict[str, Any]] = {}
        take_over(self.path, resumed_after)

    def write(self, step: int, engines: Sequence[dict[str, Any]]) -> None:
        """Record the states after a step: number, state, number of starts and last failure of each engine."""
        changed = [engine for engine in engines if engine != self._last.get(engine["engine"])]
        if not changed:
            return
        kind = "changed" if self._last else "engines"
        self._last = {engine["engine"]: engine for engine in engines}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time/unix": time.time(), kind: changed}) + "\n")


def told_engines(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The engines in a line of engines.jsonl."""
    return line["engines"] if "engines" in line else line["changed"]
