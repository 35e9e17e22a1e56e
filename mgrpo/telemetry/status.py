"""How a run stands, in `status.json` of its folder: for those who look at it from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypedDict, get_args

from mgrpo.telemetry.files import write_whole

STATUS = "status.json"
State = Literal["running", "finished", "stopped", "failed"]


class Status(TypedDict):
    """What the file holds."""

    state: State
    cause: str
    """Why the run has ended before its last step; empty otherwise, or where it was asked to."""


def write_status(folder: Path, state: State, cause: str = "") -> None:
    """Say how the run in a folder stands."""
    write_whole(folder / STATUS, json.dumps(Status(state=state, cause=cause)) + "\n")


def read_status(folder: Path) -> Status | None:
    """What a run has said last; None where it has not, or not in a readable form."""
    try:
        found = json.loads((folder / STATUS).read_text(encoding="utf-8"))
        state = found["state"]
        return Status(state=state, cause=str(found["cause"])) if state in get_args(State) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
