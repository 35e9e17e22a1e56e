"""Checkpoints on remote storage through fsspec: `gs://`, `s3://`, `memory://` and every other URL it supports.

Object stores show a file only when it is closed and complete, which is all that the folder's contract needs.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO

_BLOCK_BYTES = 32 << 20
"""Size of one upload request."""
PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "s3a": "s3fs",
    "az": "adlfs",
    "abfs": "adlfs",
    "hdfs": "pyarrow",
}
"""The package that implements each protocol."""


class RemoteFolder:
    """A folder at an fsspec URL; ValueError for an invalid URL or one whose driver is not installed."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.location = url.rstrip("/")
        protocol, _, path = url.partition("://")
        if not path.strip("/"):
            raise ValueError(f"{url} does not name a folder; write {protocol}://BUCKET/FOLDER")
        try:
            # A cached listing would never show the other ranks' files.
            self.fs, self.path = url_to_fs(self.location, use_listings_cache=False)
        except ImportError as err:
            package = PACKAGES.get(protocol, protocol)
            raise ValueError(f"{url} needs the Python package {package}: pip install {package} ({err})") from err
        except ValueError as err:
            raise ValueError(f"{url} cannot be used as a folder: {err}") from err

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.location}/{name}")

    def names(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            return [PurePosixPath(path).name for path in self.fs.ls(self.path, detail=False)]
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        self.fs.invalidate_cache()
        try:
            return self.fs.size(self._of(name))
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(self._of(name))

    def create(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        return self.fs.open(self._of(name), "wb", block_size=_BLOCK_BYTES)

    def replace(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(self._of(name), data)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._of(name))

    def remove_all(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path, recursive=True)

    def local_copy(self, name: str, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=folder)
        os.close(handle)
        self.fs.get_file(self._of(name), partial)
        os.replace(partial, folder / name)
        return folder / name

    def _of(self, name: str) -> str:
        return f"{self.path}/{name}"
