"""Room on the file system of a folder; messages name path and bytes."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 600.0
"""Seconds that a run that ends waits for room for its model."""
_POLL_S = 5.0


class OutputError(RuntimeError):
    """Files of a run were not written. Raised on all ranks alike, which can still communicate."""


def nearest_folder(path: str | Path) -> Path:
    """The folder at `path`, or the nearest one above it that exists."""
    absolute = Path(path).absolute()
    return next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))


def free_bytes(path: str | Path) -> int:
    """Bytes that this user may still write at `path`, except for a quota, which file systems do not report."""
    return shutil.disk_usage(nearest_folder(path)).free


def no_room(path: str | Path, num_bytes: int) -> str | None:
    """A sentence when `num_bytes` do not fit at `path`."""
    free = free_bytes(path)
    return None if num_bytes <= free else f"{words(num_bytes)} are needed, but {path} has {words(free)} free"


def wait_for_room(path: str | Path, num_bytes: int, *, say: Callable[[str], object], stop: threading.Event) -> None:
    """Return when there is room for `num_bytes`, after `PATIENCE_S`, or when `stop` is set.

    Args:
        say: prints once that room is missing.
    """
    deadline = time.monotonic() + PATIENCE_S
    problem = no_room(path, num_bytes)
    if problem:
        say(f"no room for the trained model: {problem}; waiting {PATIENCE_S / 60:.0f} minutes for room")
    while problem and time.monotonic() < deadline and not stop.wait(min(_POLL_S, PATIENCE_S)):
        problem = no_room(path, num_bytes)


def with_room(err: Exception, path: str | Path, num_bytes: int) -> str:
    """The message of `err`; where a full disk is the reason, with the bytes that were needed and are there."""
    if not isinstance(err, OSError) or err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return str(err)
    return f"{err.strerror}: {words(num_bytes)} are needed, and {path} has {words(free_bytes(path))} free"


def words(num_bytes: int) -> str:
    """Bytes for people, three digits."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
