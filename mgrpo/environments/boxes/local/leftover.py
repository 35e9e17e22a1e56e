"""Leftovers of a box without walls whose keeper was killed: its folder and processes. The next start of any box removes both.

The folder of a box is locked by its keeper as long as that lives, and named in the environment of the box's processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import time
from pathlib import Path

from mgrpo.sandbox.supervision import remove_folder

_PREFIX = "mgrpo-box-"
_MARK = "MGRPO_BOX"
_YOUNG_S = 60.0
"""Age in seconds below which a folder may not be locked yet."""


def make_folder() -> str:
    """Create a box's empty working folder, inside a new folder that only this user can enter."""
    import tempfile  # which a keeper does not need

    folder = os.path.join(tempfile.mkdtemp(prefix=_PREFIX), "work")
    os.mkdir(folder, mode=0o700)
    return folder


def mark(folder: str) -> dict[str, str]:
    """The variable that marks the box's processes."""
    return {_MARK: folder}


def lock(folder: str) -> int:
    """Lock a box's folder until the keeper ends; no child may inherit the descriptor."""
    descriptor = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def clear(outer: str) -> None:
    """End and remove the leftovers of a box; no-op if its keeper removed them."""
    if os.path.isdir(outer):
        _end_processes(os.path.join(outer, "work"))
        remove_folder(outer)


def sweep() -> None:
    """Remove this user's folders whose keepers have ended, and end the processes that are left of these boxes."""
    import tempfile

    for outer in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            # Any user may put links there.
            found = outer.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_own and time.time() - found.st_mtime >= _YOUNG_S and _is_left(outer):
                clear(str(outer))


def _is_left(outer: Path) -> bool:
    descriptor = os.open(outer, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _end_processes(folder: str) -> None:
    variable = f"{_MARK}={folder}".encode()
    for _ in range(10):
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdecimal() and variable in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        if not found:
            return
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
