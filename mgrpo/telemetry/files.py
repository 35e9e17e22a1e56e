"""Files of a run: each appears complete or not at all, and files of an earlier run are renamed, never overwritten."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.telemetry.recorded import record_of

logger = logging.getLogger(__name__)

MAX_NAMES = 3
"""Most files named in a message."""


def write_whole(path: Path, text: str) -> None:
    """Write or replace a file atomically; creates folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def move_aside(paths: Sequence[Path]) -> None:
    """Rename the files and folders of `paths` that exist to `NAME.N`, with the first N that is free for all of them.

    All of them are in one folder.
    """
    existing = [path for path in paths if path.exists()]
    if not existing:
        return
    number = next(n for n in itertools.count(1) if not any(Path(f"{path}.{n}").exists() for path in paths))
    renamed = [path.rename(f"{path}.{number}").name for path in existing]
    more = f" and {len(renamed) - MAX_NAMES} more" if len(renamed) > MAX_NAMES else ""
    logger.warning(
        "files of an earlier run in %s were renamed to %s%s", paths[0].parent, ", ".join(renamed[:MAX_NAMES]), more
    )


def take_over(path: Path, resumed_after: int | None) -> None:
    """Prepare a JSONL file of steps for a run that adds to it.

    Args:
        resumed_after: the step after which this run continues the run that wrote the file; its later lines are removed.
            None: a new run, which renames it.
    """
    if resumed_after is None:
        move_aside([path])
    elif path.exists():
        write_whole(path, "".join(lines_until(path, step=resumed_after)))


class StepLines:
    """A JSONL file to which steps add lines; creates folders.

    Args:
        resumed_after: as for `take_over`.
    """

    def __init__(self, path: Path, resumed_after: int | None) -> None:
        self.path = path
        take_over(path, resumed_after)

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each record, which has the key "step"; they are on disk on return."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record, default=str) + "\n" for record in records)


def lines_until(path: Path, *, step: int) -> list[str]:
    """Lines of a JSONL file before the first one of a later step, without incomplete or unreadable ones."""
    kept: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                found = record_of(line).get("step")
            except ValueError:
                continue
            if isinstance(found, int) and found > step:
                break
            if isinstance(found, int) and line.endswith("\n"):
                kept.append(line)
    return kept
