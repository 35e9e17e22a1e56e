"""Exclusive use of a folder by one run: `run.lock` names the owner and keeps a second run out.

The owner holds a flock on the file and touches it every few seconds. A dead owner's lock is recognised by that: on this machine
the kernel has released the flock; a lock of another machine, whose flock may be invisible, counts as abandoned once it has
not been touched for `ABANDONED_S`. Taking a lock waits that long, so that a job restarted on another node continues by itself.

`filelock` keeps less: its soft locks keep a dead owner's file on file systems that cannot exchange two names
(NFS, SMB) and an empty one everywhere, take a live owner's on another machine of the same host name, and don't notice a
folder that was renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from mgrpo.config import ConfigError

NAME = "run.lock"
TOUCH_S = 5.0
"""Seconds between two touches."""
ABANDONED_S = 120.0
"""Seconds without a touch after which another machine's lock is taken over."""
ADVICE = "wait for its end, stop it, or name another folder"
_POLL_S = 1.0
_RECORD_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, uniquely described."""

    host: str
    kernel: str
    """Boot of the machine and PID namespace of `pid`."""
    pid: int
    started: str
    """Start of the process, in ticks since the boot."""
    since: str
    """Time at which it took the lock, as text."""

    @classmethod
    def this(cls) -> Owner:
        """This process."""
        return cls(
            host=socket.gethostname(),
            kernel=_kernel(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        )

    @classmethod
    def read(cls, handle: int) -> Owner | None:
        """The owner in a lock; None: the lock is empty or damaged."""
        try:
            found = cls(**json.loads(os.pread(handle, _RECORD_BYTES, 0)))
        except (ValueError, TypeError):
            return None
        return found if isinstance(found.pid, int) else None

    def write(self, handle: int) -> None:
        """Write the owner into a lock, in one write of a fixed size: a reader finds the old owner or the new one."""
        os.pwrite(handle, json.dumps(asdict(self)).encode().ljust(_RECORD_BYTES), 0)
        os.fsync(handle)

    def __str__(self) -> str:
        where = "this machine" if self.kernel == _kernel() else f"host {self.host}"
        return f"process {self.pid} on {where}, since {self.since}"


@contextlib.contextmanager
def locked(folders: Iterable[str | Path], *, on_lost: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold the locks of `folders`, which are created if missing; yields a function that releases them early.

    A lock that was deleted, with or without its folder, is taken again.

    Args:
        on_lost: called at most once, from a thread, with the reason, when another run has taken one of the folders.
    Raises:
        ConfigError: another run uses one of them.
    """
    with contextlib.ExitStack() as held:
        handles = {Path(folder): held.enter_context(_lock(Path(folder))) for folder in folders}
        ended = threading.Event()
        thread = threading.Thread(target=_touch, args=(handles, held, ended, on_lost), name="run-lock", daemon=True)
        thread.start()
        held.callback(thread.join)
        held.callback(ended.set)
        yield held.close


def in_use(folder: str | Path) -> str | None:
    """Owner of a folder in words; None: no run uses it. Waits up to `ABANDONED_S` for a touch by another machine."""
    try:
        handle = os.open(Path(folder) / NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _other_owner(handle, Path(folder), fcntl.LOCK_SH)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[int]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            other = _other_owner(handle, folder, fcntl.LOCK_EX)
            if other:
                raise ConfigError([f"{folder} is in use by another run: {other}; {ADVICE}"])
            # Its owner may have deleted it between the two calls.
            if not _is_at(handle, path):
                continue
            Owner.this().write(handle)
            try:
                yield handle
            finally:
                if _is_own(handle) and _is_at(handle, path):
                    path.unlink()
            return
        finally:
            os.close(handle)


def _other_owner(handle: int, folder: Path, kind: int) -> str | None:
    """Another live owner of a lock, in words; None: the lock is free, and this process holds the flock of this `kind` if supported."""
    is_held = _is_held(handle, kind)
    owner = Owner.read(handle)
    if is_held:
        return str(owner or "a process that has just started")
    if owner is None:
        return None
    if owner.kernel == _kernel():
        lives = is_held is None and _started(owner.pid) == owner.started
        return str(owner) if lives else None
    return str(owner) if _is_touched(folder, owner) else None


def _is_held(handle: int, kind: int) -> bool | None:
    """True if another process has the flock, else this one takes it; None: the file system supports no flock."""
    # A process that only checks the lock holds it for a moment.
    deadline = time.monotonic() + 0.3
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            if time.monotonic() > deadline:
                return True
            time.sleep(0.05)
        except OSError:
            return None


def _is_touched(folder: Path, owner: Owner) -> bool:
    """True if another machine's lock is touched before it counts as abandoned."""
    first = _touched_at(folder)
    if first is None:
        return False
    # The age is wrong if the clock was set meanwhile; a live owner touches the lock all the same.
    left = min(max(ABANDONED_S - (_now(folder) - first), 2 * TOUCH_S), ABANDONED_S)
    print(
        f"mgrpo: {folder / NAME} is of {owner}; waiting up to {left:.0f} s for a sign of life from that run",
        file=sys.stderr,
    )
    deadline = time.monotonic() + left
    while time.monotonic() < deadline:
        time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0)))
        if _touched_at(folder) != first:
            return _touched_at(folder) is not None
    return False


def _touched_at(folder: Path) -> float | None:
    """Time of the last touch; opens the file each time, since network file systems cache the times of open files."""
    try:
        with open(folder / NAME, "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None


def _now(folder: Path) -> float:
    """Time by the file system's clock, as used by touches."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _touch(
    handles: dict[Path, int], held: contextlib.ExitStack, ended: threading.Event, on_lost: Callable[[str], None]
) -> None:
    while not ended.wait(TOUCH_S):
        for folder, handle in list(handles.items()):
            try:
                if _is_at(handle, folder / NAME) and Owner.read(handle) is None:
                    Owner.this().write(handle)
                elif not _names_this_run(folder / NAME):
                    handles[folder] = held.enter_context(_lock(folder))
                os.utime(folder / NAME)
            except ConfigError as err:
                on_lost(
                    f"this run has lost its folder, which was renamed or deleted, or not touched for {ABANDONED_S:g} s: "
                    f"{err.problems[0]}"
                )
                return
            except OSError:
                pass  # such as a read-only file system, which the next file that is written reports


def _names_this_run(path: Path) -> bool:
    """True if the lock at the path names this process; on network file systems its inode may have changed."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return _is_own(handle)
    finally:
        os.close(handle)


def _is_own(handle: int) -> bool:
    owner = Owner.read(handle)
    return owner is not None and (owner.kernel, owner.pid) == (_kernel(), os.getpid())


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _kernel() -> str:
    """An id that differs between machines, their boots, and containers that count their processes separately."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """Start of a process in ticks since the boot; "": no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
