"""Room on the file system of a folder: whether something fits, said with path and bytes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


def nearest_folder(path: str | Path) -> Path:
    """The folder at `path`, or the nearest one above it that exists."""
    absolute = Path(path).absolute()
    return next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))


def free_bytes(path: str | Path) -> int:
    """Bytes that this user may still write at `path`, a quota apart, which file systems do not tell."""
    return shutil.disk_usage(nearest_folder(path)).free


def no_room(path: str | Path, num_bytes: int, what: str) -> str | None:
    """A sentence when `num_bytes` do not fit at `path`."""
    free = free_bytes(path)
    return None if num_bytes <= free else f"{what} takes {words(num_bytes)}, but {path} has {words(free)} free"


def with_room(err: Exception, path: str | Path, num_bytes: int) -> str:
    """The message of `err`; where a full disk is the reason, with the bytes that were needed and are there."""
    if not isinstance(err, OSError) or err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return str(err)
    return f"{err.strerror}: {words(num_bytes)} are needed, {words(free_bytes(path))} are free in {path}"


def words(num_bytes: int) -> str:
    """Bytes for people, three digits."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
