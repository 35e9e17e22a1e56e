"""Prepared data on disk: folders named by a hash of everything they were made of, either complete or absent.

A folder is built under a temporary name and renamed. It lists its files with their sizes and checksums, so that a
damaged one is noticed and built again. Any folder may be deleted at any time.

The cache of `datasets` finds a damaged file as well as a sound one, holds tables alone, and importing it takes longer than
a start from this one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_UNFINISHED = "unfinished-"
_ABANDONED_AFTER_S = 2 * 24 * 3600
_BLOCK = 2**20


class Cache:
    """Folders of prepared data under one root."""

    def __init__(self, root: str | Path | None = None, *, skip: bool = False) -> None:
        """`root` defaults to mgrpo/datasets in the user's cache folder. With `skip` nothing is found or kept."""
        self._root = Path(root) if root is not None else default_root()
        self._skip = skip
        self._scratch: Path | None = None

    def find(self, kind: str, key: Mapping[str, Any]) -> Path | None:
        """The folder that was made from `key`, if there is an undamaged one."""
        folder = self._folder(kind, key)
        if self._skip or not folder.is_dir():
            return None
        problem = _damage(folder, key)
        if problem is None:
            return folder
        _log.warning("prepared data in %s are damaged (%s) and will be made again", folder, problem)
        return None

    def make(self, kind: str, key: Mapping[str, Any], write: Callable[[Path], object]) -> Path:
        """Fill an empty folder by `write`, and store it under `key`; returns its path.

        If another run has stored the same in the meantime, that folder is used.
        """
        parent = self._parent()
        folder = _new_folder(parent)
        lock = _lock(folder)
        try:
            write(folder)
            files = {path.name: [path.stat().st_size, _checksum(path)] for path in sorted(folder.iterdir())}
            (folder / _MANIFEST).write_text(json.dumps({"made_of": _plain(key), "files": files}, indent=1))
            return folder if parent != self._root else self._keep(folder, self._folder(kind, key), key)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(lock)

    def _keep(self, folder: Path, final: Path, key: Mapping[str, Any]) -> Path:
        for _ in range(10):
            try:
                folder.rename(final)
                return final
            except OSError:
                if not final.is_dir():
                    raise
            if _damage(final, key) is None:
                shutil.rmtree(folder, ignore_errors=True)
                return final
            # Moved before it is deleted: a half-deleted folder must not be found under this name.
            aside = _new_folder(self._root)
            with contextlib.suppress(OSError):
                final.rename(aside / "damaged")
            shutil.rmtree(aside, ignore_errors=True)
        return folder

    def _folder(self, kind: str, key: Mapping[str, Any]) -> Path:
        return self._root / f"{kind}-{digest(key)[:20]}"

    def _parent(self) -> Path:
        """The folder in which others are built: next to the finished ones, or in a folder that is deleted with this object."""
        if self._scratch is None:
            is_usable = self._is_usable()
            if is_usable and not self._skip:
                return self._root
            self._scratch = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._root if is_usable else None))
            weakref.finalize(self, os.close, _lock(self._scratch))
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        return self._scratch

    def _is_usable(self) -> bool:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if os.access(self._root, os.W_OK | os.X_OK):
                self._sweep()
                return True
            problem = "no permission to write"
        except OSError as err:
            problem = str(err)
        if not self._skip:
            _log.warning("prepared data cannot be kept in %s (%s); set dataset_local_cache_dir", self._root, problem)
        return False

    def _sweep(self) -> None:
        """Delete unfinished folders of killed runs."""
        for path in self._root.glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                    # A long run uses it still, or a clock was set; BlockingIOError.
                    lock = _lock(path, fcntl.LOCK_EX)
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)


def default_root() -> Path:
    """$XDG_CACHE_HOME/mgrpo/datasets, by default ~/.cache/mgrpo/datasets."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mgrpo" / "datasets"


def digest(value: object) -> str:
    """A hash of JSON values that is the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _new_folder(parent: Path) -> Path:
    # Not mkdtemp, which makes folders that only their owner may read: a cache may be shared.
    folder = parent / f"{_UNFINISHED}{uuid.uuid4().hex}"
    folder.mkdir()
    return folder


def _lock(folder: Path, kind: int = fcntl.LOCK_SH) -> int:
    """A descriptor that holds a flock on the folder, if the file system supports it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        pass
    return handle


def _plain(key: Mapping[str, Any]) -> Any:
    """The key after a round trip through JSON: tuples are lists."""
    return json.loads(json.dumps(key))


def _damage(folder: Path, key: Mapping[str, Any]) -> str | None:
    """The damage of a folder, in words; None if every byte is as it was written."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["made_of"] != _plain(key):
            return "it was made from something else"
        for name, (size, checksum) in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != size or _checksum(path) != checksum:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError) as err:
        return f"{type(err).__name__}: {err}"
    return None


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
