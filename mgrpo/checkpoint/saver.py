"""Saves checkpoints: every rank writes its assigned tensors, and rank 0 adds the manifest that makes it a checkpoint.

Ranks communicate through the file system only, without collectives, so that all of it can run in a thread during
training. Every file carries the attempt's token in its name: files left over from, or still being written by, a killed
attempt are never mixed in, and an older checkpoint of the step stays complete until the new manifest replaces its own.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mgrpo.checkpoint.folder import MANIFEST, Folder, LocalFolder, latest, open_folder, rotate, step_folder
from mgrpo.checkpoint.manifest import FileRecord, Index, PieceRecord, check_attempt, merge
from mgrpo.checkpoint.saving.host_copies import HostCopies, locked
from mgrpo.checkpoint.saving.near_folder import KEPT_NEAR, NearFolder
from mgrpo.checkpoint.shard import FILE_BYTES, Hashed, Part, split, write_shard
from mgrpo.checkpoint.space import with_room
from mgrpo.models.placement.boxes import Shape
from mgrpo.parallel import backend

_PAUSES_S = (0.02, 1.0)
"""Shortest and longest pause between two looks for the other ranks' indexes."""


THREADS = 4
"""Files that a rank writes at a time, each hashed as it is written: one thread hashes about 1.4 GB a second."""


class SaveError(RuntimeError):
    """A checkpoint was not saved. Earlier ones are unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """One rank's share of one checkpoint, in memory that nothing else changes."""

    step: int
    attempt: str
    parts: Sequence[Part]
    state: bytes
    full_shapes: Mapping[str, Mapping[str, Shape]]
    folders: Sequence[Folder]
    """Destinations, in the order of writing."""


class Saver:
    """Saves the train states of one run, one at a time; each rank has one.

    Args:
        root: folder or fsspec URL that holds the checkpoints, reachable by all ranks.
        keep_last_n: number of complete checkpoints to keep; -1: all.
        near: the nodes' disks, to which every state is written first.
        asynchronous: copy the tensors to host memory, see `HostCopies`, and write in a thread.
        timeout_s: limit of rank 0's wait for the other ranks' files.
        threads: files that are written at a time; 1: in the thread that calls `save`, or that it starts.
    """

    def __init__(
        self,
        root: str | Path,
        rank: int,
        world_size: int,
        *,
        keep_last_n: int,
        near: NearFolder | None = None,
        asynchronous: bool = False,
        timeout_s: float = 1800,
        file_bytes: int = FILE_BYTES,
        threads: int = THREADS,
    ) -> None:
        self.root, self.rank, self.world_size = root, rank, world_size
        self.keep_last_n, self.asynchronous = keep_last_n, asynchronous
        self.timeout_s, self.file_bytes, self.threads = timeout_s, file_bytes, threads
        self.folder, self.near = open_folder(root), near
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._snapshot = HostCopies(locked if backend.has_cuda() else None, synchronize=backend.synchronize)

    def save(
        self,
        step: int,
        parts: Sequence[Part],
        state: Mapping[str, Any],
        full_shapes: Mapping[str, Mapping[str, Shape]],
        attempt: str,
        *,
        near_only: bool = False,
    ) -> None:
        """Save one checkpoint. Every rank must call; each returns when its own files are written, rank 0 when all are.

        When asynchronous, all return as soon as the tensors are copied; the next `save` or `wait` raises a failure.

        Args:
            parts: tensors assigned to this rank.
            state: plain JSON values; only rank 0's is kept.
            full_shapes: shape of every tensor of the checkpoint by kind and name; only rank 0's is read.
            attempt: a token, equal on all ranks and different for every call.
            near_only: not to `root`; equal on all ranks.
        """
        self.wait()
        save = _Save(
            step=step,
            attempt=check_attempt(attempt),
            parts=self._snapshot.take(parts) if self.asynchronous else parts,
            state=json.dumps(state).encode() if self.rank == 0 else b"",
            full_shapes=full_shapes,
            folders=[folder for folder in (self.near, None if near_only else self.folder) if folder is not None],
        )
        if not self.asynchronous:
            self._write(save)
            return
        self._thread = threading.Thread(target=self._write_behind, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until this rank has written its files; raise the error of its thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        """The run ends with an error: stop waiting for other ranks, and leave the save in progress incomplete."""
        self._stopped.set()

    def _write_behind(self, save: _Save) -> None:
        try:
            self._write(save)
        except BaseException as err:
            self._error = err

    def _write(self, save: _Save) -> None:
        for folder in save.folders:
            self._write_to(folder, save)

    def _write_to(self, root: Folder, save: _Save) -> None:
        if isinstance(root, NearFolder):
            root.make_room()
        folder = root.child(step_folder(save.step))
        written: list[str] = []
        try:
            index = self._write_own(folder, save, written)
            if self.rank == 0:
                self._complete(folder, save, index, written)
                rotate(root, keep_last_n=self.keep_last_n if root is self.folder else KEPT_NEAR)
            else:
                self._announce(folder, index)
        except Exception as err:
            reason = self._reason(err, root, save)
            self._give_up(folder, save, written, reason)
            raise SaveError(
                f"rank {self.rank} could not save step {save.step} in {folder.location}: {reason}{self._newest()}"
            ) from err

    def _write_own(self, folder: Folder, save: _Save, written: list[str]) -> Index:
        """Write this rank's files, each named in `written` before it is opened."""

        def write(numbered: tuple[int, list[Part]]) -> tuple[str, FileRecord, list[PieceRecord]]:
            name = f"shard-{self.rank:05d}-{numbered[0]}-{save.attempt}.safetensors"
            written.append(name)
            with folder.create(name) as stream:
                return name, *write_shard(stream, name, numbered[1])

        parts = enumerate(split(save.parts, self.file_bytes, size=lambda part: part.tensor.nbytes))
        if self.threads == 1:
            results = [*map(write, parts)]
        else:
            # All threads have ended when this is left, also by an error.
            with ThreadPoolExecutor(self.threads, thread_name_prefix="checkpoint-file") as pool:
                results = [*pool.map(write, parts)]
        return replace(
            self._blank(save, self.rank),
            files={name: record for name, record, _ in results},
            pieces=tuple(piece for _, _, pieces in results for piece in pieces),
        )

    def _complete(self, folder: Folder, save: _Save, own: Index, written: list[str]) -> None:
        """Rank 0: add the trainer's state and the manifest of all ranks' files, and delete all else in the folder."""
        name = f"state-{save.attempt}.json"
        written.append(name)
        with folder.create(name) as stream:
            hashed = Hashed(stream)
            hashed.write(save.state)
        indexes = [own, *self._others(folder, save)]
        manifest = merge(indexes, state=(name, hashed.record()), full_shapes=save.full_shapes)
        written.clear()  # from here on they may belong to a complete checkpoint
        folder.replace(MANIFEST, manifest.to_json())
        for other in folder.names():
            if other != MANIFEST and other not in manifest.files:
                with contextlib.suppress(OSError):  # left over from an earlier attempt, and harmless
                    folder.remove(other)

    def _others(self, folder: Folder, save: _Save) -> list[Index]:
        """The other ranks' indexes, as soon as all exist."""
        deadline = time.monotonic() + self.timeout_s
        found: dict[int, Index] = {}
        missing, pause = set(range(1, self.world_size)), _PAUSES_S[0]
        while missing:
            names = set(folder.names())
            for rank in sorted(missing):
                if _index_name(rank, save.attempt) in names:
                    found[rank] = self._read_index(folder, save, rank)
            missing -= found.keys()
            if missing and time.monotonic() > deadline:
                raise TimeoutError(
                    f"no index of rank {', '.join(map(str, sorted(missing)))} appeared within {self.timeout_s:g} s; "
                    "all ranks must write to this one folder"
                )
            if missing and self._stopped.wait(pause):
                raise InterruptedError("the run is ending")
            pause = min(2 * pause, _PAUSES_S[1])
        return [found[rank] for rank in sorted(found)]

    def _read_index(self, folder: Folder, save: _Save, rank: int) -> Index:
        name = _index_name(rank, save.attempt)
        index = Index.from_json(folder.read(name))
        if replace(index, files={}, pieces=(), error=None) != self._blank(save, rank):
            raise ValueError(
                f"{name} is of step {index.step}, rank {index.rank} of {index.world_size}, attempt {index.attempt}"
            )
        if index.error is not None:
            raise RuntimeError(f"rank {rank} failed: {index.error}")
        return index

    def _blank(self, save: _Save, rank: int) -> Index:
        return Index(step=save.step, rank=rank, world_size=self.world_size, attempt=save.attempt)

    def _announce(self, folder: Folder, index: Index) -> None:
        folder.replace(_index_name(index.rank, index.attempt), index.to_json())

    def _reason(self, err: Exception, root: Folder, save: _Save) -> str:
        place = root.local if isinstance(root, NearFolder) else root
        if not isinstance(place, LocalFolder):
            return str(err)
        return with_room(err, place.path, sum(part.tensor.nbytes for part in save.parts))

    def _give_up(self, folder: Folder, save: _Save, written: list[str], reason: str) -> None:
        """Delete the written files and send rank 0 the reason. Both may fail as the writing did."""
        for name in written:
            with contextlib.suppress(Exception):
                folder.remove(name)
        if self.rank != 0:
            with contextlib.suppress(Exception):
                self._announce(folder, replace(self._blank(save, self.rank), error=reason))

    def _newest(self) -> str:
        with contextlib.suppress(Exception):
            if path := latest(self.root):
                return f"; the newest complete checkpoint is {path}"
        return ""


def _index_name(rank: int, attempt: str) -> str:
    return f"shard-{rank:05d}-{attempt}.json"
