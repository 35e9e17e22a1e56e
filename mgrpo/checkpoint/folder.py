"""The folders of checkpoints: operations of a folder, local or remote, and the complete checkpoints of a root.

A checkpoint `<root>/step_N` exists if and only if its manifest does. No torch: a run looks here before it starts
anything.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from mgrpo.checkpoint.space import nearest_folder

MANIFEST = "manifest.json"
ABANDONED = "manifest.abandoned.json"
"""The name of the manifest in a checkpoint that the run has abandoned."""
NEAR = "near"
"""Subfolder of the states with the manifests of those whose tensors are on the nodes' disks."""
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_log = logging.getLogger(__name__)


class Folder(Protocol):
    """A folder, local or remote. Names are those of files directly in it; a missing one is a FileNotFoundError."""

    location: str

    def child(self, name: str) -> Folder: ...

    def names(self) -> list[str]:
        """The names of everything in it; none when it does not exist."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when it does not exist."""

    def read(self, name: str) -> bytes: ...

    def create(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file to write, on stable storage once the context is left without an error."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a file atomically: a reader finds the old one or the new one, also after a crash."""

    def remove(self, name: str) -> None:
        """Delete a file if it exists."""

    def remove_all(self) -> None:
        """Delete the folder."""

    def local_copy(self, name: str, folder: Path) -> Path:
        """A path on this machine from which the file can be read; a copy, where one is needed, goes into `folder`."""


class LocalFolder:
    """A folder on a file system of this machine, shared or not."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.location = str(path)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        try:
            return os.stat(self.path / name).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        new = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in new:
            _sync(path.parent)
        with open(self.path / name, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _sync(self.path)

    def replace(self, name: str, data: bytes) -> None:
        partial = f"{name}.partial-{os.getpid()}"
        try:
            with self.create(partial) as file:
                file.write(data)
            os.replace(self.path / partial, self.path / name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(partial)
            raise
        _sync(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        shutil.rmtree(self.path)

    def local_copy(self, name: str, folder: Path) -> Path:
        return self.path / name


def open_folder(root: str | Path) -> Folder:
    """The folder at a path, or at an fsspec URL such as `gs://bucket/run`."""
    protocol, mark, rest = str(root).partition("://")
    if not mark:
        return LocalFolder(root)
    if protocol in ("file", "local"):
        return LocalFolder(rest)
    from mgrpo.checkpoint.remote import RemoteFolder

    return RemoteFolder(str(root))


def check_root(root: str | Path) -> None:
    """Raise ValueError when no checkpoint can be kept at `root`: no driver, no access, or it is a file."""
    folder = open_folder(root)
    if not isinstance(folder, LocalFolder):
        try:
            folder.names()
        except Exception as err:  # every driver raises its own errors
            raise ValueError(f"checkpoints cannot be kept in {root}, which cannot be listed: {err!r}") from err
        return
    if why := unwritable(folder.path):
        raise ValueError(f"checkpoints cannot be kept in {root}: {why}; name another folder")


def unwritable(path: str | Path) -> str | None:
    """Reason why files cannot be written in the folder at `path`, which may not exist yet; None if they can. Leaves nothing."""
    nearest = nearest_folder(path)
    if not nearest.is_dir():
        return f"{nearest} is a file"
    try:
        with tempfile.TemporaryDirectory(prefix=".mgrpo-", dir=nearest):
            return None
    except OSError as err:
        return f"nothing can be written to {nearest} ({err.strerror})"


def step_folder(step: int) -> str:
    """Name of a step's folder."""
    return f"step_{step}"


def step_of(name: str) -> int | None:
    """The step whose folder is called so; None for another name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def split_path(path: str | Path) -> tuple[Folder, int]:
    """Root and step of the path of a checkpoint; ValueError for another path."""
    root, _, name = str(path).rstrip("/").rpartition("/")
    found = _STEP.fullmatch(name)
    if not found:
        steps = complete(path)
        hint = f"; the newest in it is {step_path(path, steps[-1])}" if steps else ""
        raise ValueError(f"{path} is not a checkpoint, whose folder is called step_N{hint}")
    return open_folder(root or ("/" if str(path).startswith("/") else ".")), int(found[1])


def step_path(root: str | Path, step: int) -> str:
    """Path or URL of a checkpoint."""
    return f"{str(root).rstrip('/')}/{step_folder(step)}"


def near_root(root: str | Path) -> str:
    """Folder of the manifests of near states, beside the states on storage in `root`."""
    return f"{str(root).rstrip('/')}/{NEAR}"


def is_near(path: str | Path) -> bool:
    """True if the tensors of the checkpoint at `path` are on the nodes' disks."""
    return str(path).rstrip("/").split("/")[-2:-1] == [NEAR]


def resumable(root: str | Path) -> list[str]:
    """Paths of the complete checkpoints from which the run of `root` can go on, the newest first; of equal steps the near one."""
    own = [(step, 0, root) for step in complete(root)] + [
        (step, 1, near_root(root)) for step in complete(near_root(root))
    ]
    return [step_path(place, step) for step, _, place in sorted(own, key=lambda each: each[:2], reverse=True)]


def lies_in(path: str | Path, root: str | Path) -> bool:
    """True if the checkpoint at `path` is in `root`, near ones included."""
    return any(_lies_directly_in(path, place) for place in (root, near_root(root)))


def _lies_directly_in(path: str | Path, root: str | Path) -> bool:
    origin, _ = split_path(path)
    here = open_folder(root)
    if isinstance(origin, LocalFolder) and isinstance(here, LocalFolder):
        return origin.path.resolve() == here.path.resolve()
    return origin.location.rstrip("/") == here.location.rstrip("/")


def check_complete(root: Folder, step: int) -> None:
    """Raise ValueError, naming the newest complete one, when the checkpoint of this step is not complete."""
    if root.child(step_folder(step)).size(MANIFEST) is None:
        steps = complete_in(root)
        hint = f"the newest complete one is {step_path(root.location, steps[-1])}" if steps else "none is complete"
        raise ValueError(f"{step_path(root.location, step)} is not a complete checkpoint, it has no {MANIFEST}; {hint}")


def complete(root: str | Path) -> list[int]:
    """Steps of all complete checkpoints of `root`, ascending."""
    return complete_in(open_folder(root))


def latest(root: str | Path) -> str | None:
    """Path of the newest complete checkpoint of `root`; None without any."""
    steps = complete(root)
    return step_path(root, steps[-1]) if steps else None


def abandon(root: str | Path, *, after: int) -> list[int]:
    """Take the complete checkpoints after step `after` out of the run and return their steps. One process must call.

    A run that does not continue from its newest checkpoint calls it: otherwise the next resume would find that one
    again, and rotation would delete the new ones. Their manifests are renamed; rotation deletes their folders later.
    """
    found: set[int] = set()
    for folder in (open_folder(root), open_folder(near_root(root))):
        steps = [step for step in complete_in(folder) if step > after]
        for step in steps:
            own = folder.child(step_folder(step))
            try:
                own.replace(ABANDONED, own.read(MANIFEST))
                own.remove(MANIFEST)
            except IsADirectoryError as err:
                _log.warning("%s cannot be taken out of the run: %s", own.location, err)
        found.update(steps)
    return sorted(found)


def rotate(folder: Folder, *, keep_last_n: int) -> None:
    """Keep the newest complete checkpoints (-1: all); delete the others, and incomplete folders older than the newest.

    A failed deletion is logged and tried again next time; it must not end the run.
    """
    for step in superseded(_steps(folder), complete_in(folder), keep_last_n=keep_last_n):
        own = folder.child(step_folder(step))
        try:
            own.remove(MANIFEST)  # first, so that a partly deleted checkpoint never looks complete
            own.remove_all()
        except OSError as err:
            _log.warning("%s cannot be deleted: %s", own.location, err)


def superseded(steps: Iterable[int], complete: Sequence[int], *, keep_last_n: int) -> list[int]:
    """The steps whose states are to be deleted: older than the newest complete one, and not among those that are kept.

    Args:
        steps: all that have a folder, also incomplete ones.
        complete: those that are complete, ascending.
        keep_last_n: number of these to keep, at least one; -1: all.
    """
    if not complete:
        return []
    kept = set(complete if keep_last_n < 0 else complete[-max(keep_last_n, 1) :])
    return [step for step in steps if step < complete[-1] and step not in kept]


def _steps(folder: Folder) -> list[int]:
    return sorted(step for name in folder.names() if (step := step_of(name)) is not None)


def complete_in(folder: Folder) -> list[int]:
    """Steps of all complete checkpoints of an open folder, ascending."""
    return [step for step in _steps(folder) if folder.child(step_folder(step)).size(MANIFEST) is not None]


def _sync(path: Path) -> None:
    """Flush the entries of a folder to stable storage."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot sync folders
            raise
    finally:
        os.close(handle)
