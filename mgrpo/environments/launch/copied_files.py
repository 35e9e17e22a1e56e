"""Files of the run's machine that are copied into boxes: a folder, and those that a command names."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mgrpo.environments.boxes.box import Box

_MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class File:
    data: bytes
    mode: int


@dataclass(frozen=True, slots=True)
class Files:
    """Files by their paths, relative to a box's working folder. Read once: later changes are ignored."""

    by_path: Mapping[str, File]

    async def put_into(self, box: Box, folder: str | None = None) -> None:
        """Write all of them to a folder; None: the working folder.

        Raises:
            OSError: they cannot be written.
        """
        for path, file in self.by_path.items():
            await box.put(path if folder is None else f"{folder}/{path}", file.data, mode=file.mode)

    def __or__(self, other: Files) -> Files:
        return Files({**self.by_path, **other.by_path})


def files_of_folder(folder: str) -> Files:
    """All files below a folder, also those behind links in it.

    Raises:
        ValueError: it is no folder, cannot be read, or holds too much for a copy in every box.
    """
    if not os.path.isdir(folder):
        raise ValueError(f"agent_files={folder} must be a folder")
    found: dict[str, File] = {}
    num_bytes = 0
    for home, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(home, name)
            num_bytes += path.stat().st_size if path.is_file() else 0
            if num_bytes > _MOST_BYTES:
                raise ValueError(
                    f"agent_files={folder} holds more than {_MOST_BYTES >> 20} MiB, which every agent would get a copy of; make it "
                    "smaller, or put it into agent_image"
                )
            if path.is_file():
                found[path.relative_to(folder).as_posix()] = _read(path)
    return Files(found)


def files_of_command(words: Sequence[str], known: Files) -> Files:
    """The files of the current folder that a command names by relative paths, unless `known` has them."""
    paths = [word for word in words if not os.path.isabs(word) and word not in known.by_path]
    return Files({path: _read(Path(path)) for path in paths if _stays_below(path) and os.path.isfile(path)})


def _stays_below(path: str) -> bool:
    return ".." not in PurePosixPath(path).parts and PurePosixPath(path).as_posix() == path


def _read(path: Path) -> File:
    try:
        return File(path.read_bytes(), stat.S_IMODE(path.stat().st_mode) | stat.S_IRUSR | stat.S_IWUSR)
    except OSError as err:
        raise ValueError(f"{path} is to be copied for agents and cannot be read: {err.strerror}") from err
