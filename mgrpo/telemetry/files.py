"""Files of a run: each appears complete or not at all, and files of an earlier run are renamed, never overwritten."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_NAMES = 3
"""Files named in one message."""


def write_whole(path: Path, text: str) -> None:
    """Write or replace a file in one step; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def move_aside(paths: Sequence[Path]) -> None:
    """Rename those of `paths`, files or folders of one folder, that exist to `NAME.N` with the first N free for all."""
    existing = [path for path in paths if path.exists()]
    if not existing:
        return
    number = next(n for n in itertools.count(1) if not any(Path(f"{path}.{n}").exists() for path in paths))
    renamed = [path.rename(f"{path}.{number}").name for path in existing]
    more = f" and {len(renamed) - MAX_NAMES} more" if len(renamed) > MAX_NAMES else ""
    logger.warning(
        "files of an earlier run in %s were renamed to %s%s", paths[0].parent, ", ".join(renamed[:MAX_NAMES]), more
    )
