"""States on disks of the nodes: a rank's tensors are on its own node's and on another's, so that one node may be lost.

Small files are on storage, in `near/step_N` of the run's states: indexes, the trainer's own state and the manifest, which
makes such a state complete, like any other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from mgrpo.checkpoint.folder import Folder, LocalFolder, complete_in, step_folder, step_of, superseded
from mgrpo.checkpoint.manifest import FileRecord
from mgrpo.models.hf_files.checksums import sha256_of

KEPT_NEAR = 1
"""Complete near states that are kept; the next one is stored in addition while it is written."""
THREADS = 4
"""Files that a rank compares with their checksums at a time."""
TENSORS = ".safetensors"
FETCHED = "fetched-"
"""A rank's copies of other nodes' files have a folder with this beginning, until the next save."""


def partner(rank: int, nodes: Sequence[str]) -> int | None:
    """The rank that keeps copies of `rank`'s files: its like on the next node; None where all are on one node.

    Args:
        nodes: a name of each rank's node.
    """
    ranks: dict[str, list[int]] = {}
    for each, node in enumerate(nodes):
        ranks.setdefault(node, []).append(each)
    if len(ranks) < 2:
        return None
    names = [*ranks]
    there = ranks[names[(names.index(nodes[rank]) + 1) % len(names)]]
    return there[ranks[nodes[rank]].index(rank) % len(there)]


def node_name(folder: Path) -> str:
    """Identity of this disk: a random name stored in the folder, created on first use."""
    folder.mkdir(parents=True, exist_ok=True)
    own, name = folder / f"node.{secrets.token_hex(8)}", folder / "node"
    own.write_text(secrets.token_hex(16))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(own, name)
    finally:
        own.unlink()
    return name.read_text()


Send = Callable[[Folder, str], object]
"""Puts a copy of a file of a folder on another node's disk."""
Fetch = Callable[[str, str, Path], Path]
"""A copy of a step's folder's file in another folder; a FileNotFoundError where no node has it."""


class NearFolder:
    """The `Folder` of near states on one rank."""

    def __init__(
        self,
        shared: Folder,
        local: Folder,
        *,
        send: Send | None = None,
        fetch: Fetch | None = None,
        sizes: Mapping[str, int] | None = None,
        name: str = "",
    ) -> None:
        """
        Args:
            shared: on storage.
            local: on this node's disk.
            send: to the partner; None: there is one node.
            fetch: from other nodes, for a state that is read.
            sizes: bytes of the files of this state that any node holds.
            name: the folder's own.
        """
        self.shared, self.local, self.send, self.fetch, self.sizes = shared, local, send, fetch, sizes or {}
        self.location, self.name = shared.location, name

    def child(self, name: str) -> NearFolder:
        shared, local = self.shared.child(name), self.local.child(name)
        return NearFolder(shared, local, send=self.send, fetch=self.fetch, sizes=self.sizes, name=name)

    def names(self) -> list[str]:
        return [*self.shared.names(), *(name for name in self.local.names() if name.endswith(TENSORS))]

    def size(self, name: str) -> int | None:
        if not name.endswith(TENSORS):
            return self.shared.size(name)
        found = self.local.size(name)
        return self.sizes.get(name) if found is None else found

    def read(self, name: str) -> bytes:
        return self.shared.read(name)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """A file; one of tensors is also on the partner's disk once the context is left without an error."""
        if not name.endswith(TENSORS):
            with self.shared.create(name) as stream:
                yield stream
            return
        with self.local.create(name) as stream:
            yield stream
        if self.send is not None:
            self.send(self.local, name)

    def replace(self, name: str, data: bytes) -> None:
        self.shared.replace(name, data)

    def remove(self, name: str) -> None:
        (self.local if name.endswith(TENSORS) else self.shared).remove(name)

    def remove_all(self) -> None:
        _empty(self.local)
        self.shared.remove_all()

    def local_copy(self, name: str, folder: Path) -> Path:
        if self.local.size(name) is not None:
            return self.local.local_copy(name, folder)
        if self.fetch is None:
            raise FileNotFoundError(f"{name} is not on this node")
        return self.fetch(self.name, name, folder)

    def make_room(self) -> None:
        """Delete superseded states, and files fetched for a resume, from this node's disk."""
        for name in self.local.names():
            if name.startswith(FETCHED):
                _empty(self.local.child(name))
        steps = [step for name in self.local.names() if (step := step_of(name)) is not None]
        for step in superseded(steps, complete_in(self.shared), keep_last_n=KEPT_NEAR):
            _empty(self.local.child(step_folder(step)))


def _empty(folder: Folder) -> None:
    """Delete a folder. Another rank of this node may do it at the same time, or write into a partner's."""
    with contextlib.suppress(OSError):
        folder.remove_all()


def sound_files(folder: LocalFolder, files: Mapping[str, FileRecord]) -> list[str]:
    """Names of the files that are present and unchanged. Others are deleted: another node's copy takes their place."""

    def is_sound(name: str) -> bool:
        try:
            if folder.size(name) == files[name].num_bytes and sha256_of(folder.path / name) == files[name].sha256:
                return True
            folder.remove(name)
        except OSError:
            pass
        return False

    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-file") as pool:
        return [name for name, sound in zip(files, pool.map(is_sound, files), strict=True) if sound]
