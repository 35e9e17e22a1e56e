"""Reads any box of any tensor of a checkpoint, written in any layout, from the slices that are needed."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mgrpo.checkpoint.boxes import described
from mgrpo.checkpoint.folder import MANIFEST, Folder, LocalFolder, split_path
from mgrpo.checkpoint.manifest import PieceRecord, TensorRecord
from mgrpo.checkpoint.mapped import MappedFiles
from mgrpo.checkpoint.shard import CODES, DTYPES
from mgrpo.checkpoint.stored import Stored
from mgrpo.models.hf_files.checksums import THREADS, sha256_of
from mgrpo.models.placement.boxes import Box, Shape


def open_checkpoint(path: str | Path, *, cache: str | Path | None = None) -> StoredCheckpoint:
    """The complete checkpoint at a path or URL `.../step_N`.

    Args:
        cache: folder that takes copies of the files of a remote checkpoint as they are needed; by default a temporary
            one that `close` deletes.
    Raises:
        ValueError: there is no complete checkpoint at `path`.
        DamagedCheckpoint: it has changed since it was written.
    """
    folder, step = split_path(path)
    return StoredCheckpoint(folder, step, cache=None if cache is None else Path(cache))


class StoredCheckpoint:
    """A train state on storage. Its files are read when a box is requested."""

    def __init__(self, root: Folder, step: int, *, cache: Path | None = None) -> None:
        self._stored = Stored(root, step)
        self.step, self.path = step, self._stored.path
        self._folder, self._manifest = self._stored.folder, self._stored.manifest
        for kind, by_name in self._manifest.tensors.items():
            for name, own in by_name.items():
                if own.dtype not in DTYPES:
                    raise self._stored.damaged(f"{MANIFEST} gives {kind} {name} the type {own.dtype!r}")
        self._is_remote = not isinstance(root, LocalFolder)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if cache is None and self._is_remote:
            self._temporary = tempfile.TemporaryDirectory(prefix="mgrpo-checkpoint-")
            cache = Path(self._temporary.name)
        # A local folder makes no copies.
        self._cache = cache or Path(self.path)
        self._local: dict[str, Path] = {}
        self._mapped = MappedFiles()

    @property
    def world_size(self) -> int:
        """Learner ranks of the run that wrote it."""
        return self._manifest.world_size

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's own state."""
        return self._stored.state

    @property
    def kinds(self) -> list[str]:
        """The kinds of tensors it holds."""
        return sorted(self._manifest.tensors)

    def names(self, kind: str) -> list[str]:
        """Tensors of a kind."""
        return sorted(self._manifest.tensors.get(kind, ()))

    def shape(self, kind: str, name: str) -> Shape:
        """Full shape of a tensor."""
        return self._tensor(kind, name).shape

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Type in which a tensor is stored."""
        return DTYPES[self._tensor(kind, name).dtype]

    @torch.no_grad()
    def read(self, kind: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """The values of one box, assembled from the pieces that it overlaps.

        Args:
            out: takes the values, in its own type and on its own device; by default a new tensor as stored.
        """
        own = self._tensor(kind, box.name)
        if out is None:
            out = torch.empty(box.shape, dtype=DTYPES[own.dtype])
        assert tuple(out.shape) == box.shape, (kind, box, tuple(out.shape))
        covered = 0
        for piece in own.pieces:
            common = box.intersect(piece.box)
            if common is not None:
                out[common.within(box)].copy_(self._slice(own, piece, common))
                covered += common.size
        if covered != box.size:
            raise ValueError(f"{kind} {described(box)} reaches beyond its tensor in {self.path}, {list(own.shape)}")
        return out

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Raise DamagedCheckpoint unless size and checksum of this rank's share of the files are as written."""
        with ThreadPoolExecutor(THREADS) as threads:
            for _ in threads.map(self._verify, list(self._manifest.files)[rank::world_size]):
                pass

    def close(self) -> None:
        """Close its files, and delete temporary copies of remote ones."""
        self._mapped.close()
        self._local.clear()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _tensor(self, kind: str, name: str) -> TensorRecord:
        by_name = self._manifest.tensors.get(kind)
        if by_name is None:
            raise ValueError(f"{self.path} holds no {kind}, only {', '.join(self.kinds)}")
        if name not in by_name:
            raise ValueError(f"{self.path} holds no {kind} of {name}")
        return by_name[name]

    def _slice(self, own: TensorRecord, piece: PieceRecord, wanted: Box) -> torch.Tensor:
        path = self._path_of(piece.file)
        try:
            dtype, shape = self._mapped.header(path, piece.key)
            if (dtype, shape) == (DTYPES[own.dtype], piece.box.shape):
                return self._mapped.read(path, piece.key, wanted.within(piece.box))
        except (SafetensorError, OSError, ValueError) as err:
            raise self._stored.damaged(f"{piece.file} cannot be read: {err}") from err
        raise self._stored.damaged(
            f"{piece.file}: {piece.key!r} is {CODES[dtype]} {list(shape)}, expected {own.dtype} {list(piece.box.shape)}"
        )

    def _verify(self, name: str) -> None:
        path = self._path_of(name)
        if not self._is_remote:
            self._check_sum(name, path)

    def _path_of(self, name: str) -> Path:
        """The place of a file on this machine; the copy of a remote file is checked when it is made."""
        if name not in self._local:
            self._stored.check_size(name)
            path = self._folder.local_copy(name, self._cache)
            if self._is_remote and path.parent == self._cache:
                self._check_sum(name, path)
            self._local[name] = path
        return self._local[name]

    def _check_sum(self, name: str, path: Path) -> None:
        try:
            found = sha256_of(path)
        except OSError as err:
            raise self._stored.damaged(f"{name} cannot be read: {err}") from err
        if found != self._manifest.files[name].sha256:
            raise self._stored.damaged(f"{name} has changed since it was written, its checksum differs")
