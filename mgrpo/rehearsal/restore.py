"""The state of a learner that continues from a checkpoint, whose files no rehearsal has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from mgrpo.checkpoint.boxes import described
from mgrpo.checkpoint.folder import MANIFEST, LocalFolder, step_folder, step_path
from mgrpo.checkpoint.manifest import FileRecord, Index, PieceRecord, merge
from mgrpo.checkpoint.mapped import MappedFiles
from mgrpo.checkpoint.reader import StoredCheckpoint, open_checkpoint
from mgrpo.checkpoint.shard import CODES, DTYPES
from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.run.train.learner import Learner

_FILE, _STATE = "unwritten.safetensors", "state.json"


class _Unwritten(MappedFiles):
    """Files as a manifest describes them: zeros, which take no memory, except for `known` tensors."""

    def __init__(self, pieces: list[PieceRecord], known: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._pieces = {piece.key: piece for piece in pieces}
        self._known = known

    def header(self, path: Path, name: str) -> tuple[torch.dtype, Shape]:
        piece = self._pieces[name]
        return DTYPES[piece.dtype], piece.box.shape

    def read(self, path: Path, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        dtype, shape = self.header(path, name)
        values = self._known.get(name)
        return (torch.zeros(1, dtype=dtype).expand(shape) if values is None else values)[region]


def checkpoint_of(learner: Learner, folder: str) -> StoredCheckpoint:
    """The checkpoint that all ranks would save now, opened: kinds, names, shapes and types are those that this rank would write.

    Every tensor is one piece, as if a single rank had written it. Its manifest is written into `folder`, its tensors are not;
    only this rank's random states have values.
    """
    parts = learner.state.parts()
    dtypes = {part.kind: CODES[part.tensor.dtype] for part in parts}
    shapes = learner.state.full_shapes()
    pieces = [
        PieceRecord(kind=kind, dtype=dtypes[kind], box=box, file=_FILE, key=f"{kind} {described(box)}")
        for kind, by_name in shapes.items()
        for box in (Box(name, (0,) * len(shape), shape) for name, shape in by_name.items())
    ]
    root = LocalFolder(folder)
    files = {_FILE: b"", _STATE: json.dumps({"learner": learner.state_dict()}).encode()}
    records = {}
    for name, data in files.items():
        root.child(step_folder(1)).replace(name, data)
        records[name] = FileRecord(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    index = Index(
        step=1,
        rank=0,
        world_size=dist.get_world_size(),
        attempt="rehearsal",
        files={_FILE: records[_FILE]},
        pieces=tuple(pieces),
    )
    manifest = merge([index], state=(_STATE, records[_STATE]), full_shapes=shapes)
    root.child(step_folder(1)).replace(MANIFEST, manifest.to_json())
    checkpoint = open_checkpoint(step_path(folder, 1))
    on_host = {f"{part.kind} {described(part.box)}": part.tensor for part in parts if not part.tensor.is_cuda}
    vars(checkpoint)["_mapped"] = _Unwritten(pieces, on_host)
    return checkpoint
