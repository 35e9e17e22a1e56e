"""A model's weights as the ranks of one Megatron layout hold them, in safetensors files that any layout can load.

    config.json, tokenizer, ...          copied, see `hf_folder.carry`
    tp_00_pp_000_ep_00-0.safetensors     parameters of the ranks with these coordinates, in files of bounded size
    megatron.json                        written last: the layout, the model's shape, size and checksum of every file

Names, shapes and contents are those of `models.table.local_parameters`: query, key and value rows interleaved by group,
gate above up, a rank's experts one above the other, a padded vocabulary; layers are counted over the whole model. Ranks
that differ only in their data or context coordinate hold the same and share a file. Where experts are distributed over
ranks, they do not depend on the tensor coordinate and nothing else depends on the expert coordinate: experts are in the
files of tp_00, everything else in those of ep_00.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mgrpo.checkpoint.boxes import covers
from mgrpo.checkpoint.folder import LocalFolder
from mgrpo.checkpoint.manifest import FileRecord, file_name
from mgrpo.checkpoint.mapped import MappedFiles
from mgrpo.checkpoint.shard import CODES, FILE_BYTES, split, write_tensors
from mgrpo.layout import Layout
from mgrpo.model_io.hf_folder import Tell, dtype_name, header_bytes, row_blocks
from mgrpo.models.hf_files.checksums import sha256_of_each
from mgrpo.models.hf_files.weight_files import MEGATRON
from mgrpo.models.placement.boxes import Box, LocalParameter, Piece
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors, local_parameters
from mgrpo.policy.weights import Read, parameter_rows

VERSION = 2
_AXES = ("tensor", "pipeline", "expert", "virtual_pipeline", "first_stage_layers", "last_stage_layers")
"""The axes of a layout that determine which rank holds which weights."""


def stem(*, tensor: int, pipeline: int, expert: int) -> str:
    """The beginning of the names of the files of these coordinates."""
    return f"tp_{tensor:02d}_pp_{pipeline:03d}_ep_{expert:02d}"


def stored_parameters(shape: ModelShape, layout: Layout) -> dict[str, dict[str, LocalParameter]]:
    """Parameters in the files of each stem. Of `layout` only the axes that distribute weights matter.

    Raises:
        ValueError: together they are not the whole model, because a size does not divide.
    """
    layout = _smallest(layout)
    stored: dict[str, dict[str, LocalParameter]] = {}
    for rank in range(layout.world_size):
        place = layout.coordinate(rank)
        for name, parameter in local_parameters(shape, layout, rank).items():
            is_shared_out = ".experts." in name and layout.expert > 1
            own = stem(
                tensor=0 if is_shared_out else place.tensor,
                pipeline=place.pipeline,
                expert=place.expert if is_shared_out else 0,
            )
            stored.setdefault(own, {}).setdefault(name, parameter)
    covers(_first_places(stored), hf_tensors(shape))
    return dict(sorted(stored.items()))


def _smallest(layout: Layout) -> Layout:
    """The same without data and context ranks, except those that experts are distributed over."""
    ranks = layout.pipeline * math.lcm(layout.tensor, layout.expert)
    return Layout(world_size=ranks, **{axis: getattr(layout, axis) for axis in _AXES})


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of an HF tensor's box in a stored parameter."""

    stem: str
    name: str
    piece: Piece


def _first_places(stored: Mapping[str, Mapping[str, LocalParameter]]) -> dict[Box, _Place]:
    """First of the parameters that hold each box."""
    places: dict[Box, _Place] = {}
    for own, parameters in stored.items():
        for name, parameter in parameters.items():
            for piece in parameter.pieces:
                places.setdefault(piece.box, _Place(own, name, piece))
    return places


def write_megatron(
    read: Read,
    shape: ModelShape,
    layout: Layout,
    dtypes: Mapping[str, torch.dtype],
    folder: Path,
    *,
    file_bytes: int = FILE_BYTES,
    tell: Tell = lambda num_bytes: None,
) -> None:
    """Write all ranks' parameters to `folder`, with one block of rows in memory at a time.

    Args:
        read: gives boxes of HF tensors.
        dtypes: type of each HF tensor, in which it is kept.
    Raises:
        ValueError: tensors that make up one parameter are of different types.
    """
    stored = stored_parameters(shape, layout)
    kept = parameter_dtypes(stored, dtypes)
    files: dict[str, FileRecord] = {}
    places: dict[str, dict[str, str]] = {}
    for own, parameters in stored.items():
        headers = {name: (kept[name], parameter.shape) for name, parameter in parameters.items()}
        sizes = {name: header_bytes(header) for name, header in headers.items()}
        places[own] = {}
        for number, names in enumerate(split(headers, file_bytes, size=sizes.__getitem__)):
            file = f"{own}-{number}.safetensors"
            with LocalFolder(folder).create(file) as stream:
                chosen = {name: headers[name] for name in names}
                files[file] = write_tensors(stream, chosen, partial(_blocks, parameters, kept, read, tell))
            places[own] |= dict.fromkeys(names, file)
    record = {
        "version": VERSION,
        "layout": {axis: getattr(layout, axis) for axis in _AXES},
        "dtype": dtype_name(Counter(dtypes.values()).most_common(1)[0][0]),
        "model": asdict(shape),
        "files": {file: written.as_json() for file, written in files.items()},
        "parameters": places,
    }
    LocalFolder(folder).replace(MEGATRON, json.dumps(record, indent=1).encode())


def stored_bytes(shape: ModelShape, layout: Layout, dtypes: Mapping[str, torch.dtype]) -> int:
    """Size of everything that `write_megatron` writes."""
    stored = stored_parameters(shape, layout)
    kept = parameter_dtypes(stored, dtypes)
    return sum(
        header_bytes((kept[name], own.shape)) for parameters in stored.values() for name, own in parameters.items()
    )


def parameter_dtypes(
    stored: Mapping[str, Mapping[str, LocalParameter]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    # By name over all ranks, because one may hold only padding and takes the type of the others.
    sources: dict[str, dict[torch.dtype, str]] = {}
    for parameters in stored.values():
        for name, parameter in parameters.items():
            for piece in parameter.pieces:
                sources.setdefault(name, {}).setdefault(dtypes[piece.box.name], piece.box.name)
    for name, by_dtype in sources.items():
        if len(by_dtype) > 1:
            found = " and ".join(f"{source} is {dtype_name(dtype)}" for dtype, source in by_dtype.items())
            raise ValueError(
                f"{found}, but both are parts of Megatron's {name}, which has one type; give them the same"
            )
        for dtype, source in by_dtype.items():
            if dtype not in CODES:
                raise ValueError(f"{source} has type {dtype}, which safetensors files cannot hold")
    return {name: next(iter(by_dtype)) for name, by_dtype in sources.items()}


def _blocks(
    parameters: Mapping[str, LocalParameter], dtypes: Mapping[str, torch.dtype], read: Read, tell: Tell, name: str
) -> Iterator[torch.Tensor]:
    """A parameter's values in blocks of rows."""
    for rows in row_blocks("", (dtypes[name], parameters[name].shape)):
        values = parameter_rows(parameters[name], rows, dtypes[name], read)
        tell(values.nbytes)
        yield values


def is_megatron_folder(path: str | Path) -> bool:
    """True if a folder holds weights in this format."""
    return (Path(path) / MEGATRON).is_file()


def megatron_reader(folder: str | Path, shape: ModelShape) -> Read:
    """Reads boxes of HF tensors from a Megatron folder of any layout.

    Raises:
        ValueError: it is damaged, or its tensors are not those of `shape`.
    """
    stored = MegatronFolder(folder)
    if hf_tensors(stored.shape) != hf_tensors(shape):
        raise ValueError(f"{folder} holds weights of another model than its config.json says; convert the model again")
    return stored.read


class MegatronFolder:
    """The weights of a Megatron folder, as boxes of HF tensors.

    Raises:
        ValueError: it is not as `write_megatron` wrote it. Only `check_sums` compares contents with their checksums.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self._mapped = Path(path), MappedFiles()
        record = self._record()
        try:
            self.shape = ModelShape.from_dict(record["model"])
            self.layout = _smallest(Layout(world_size=1, **record["layout"]))
            self._files = {file_name(name): FileRecord.from_json(file) for name, file in record["files"].items()}
            self._parameters = stored_parameters(self.shape, self.layout)
            self._file_of = {
                own: {name: record["parameters"][own][name] for name in parameters}
                for own, parameters in self._parameters.items()
            }
        except (KeyError, TypeError, AttributeError, ValueError) as err:
            raise self._damaged(f"{MEGATRON} is malformed: {err!r}") from None
        for name, file in self._files.items():
            found = self.path / name
            if not found.is_file():
                raise self._damaged(f"{name} is missing")
            if found.stat().st_size != file.num_bytes:
                raise self._damaged(f"{name} has {found.stat().st_size} bytes instead of {file.num_bytes}")
        dtypes = {(own, name): self._dtype(own, name) for own, names in self._parameters.items() for name in names}
        self._places: dict[str, dict[Box, _Place]] = {name: {} for name in hf_tensors(self.shape)}
        self.dtypes: dict[str, torch.dtype] = {}
        for box, place in _first_places(self._parameters).items():
            self._places[box.name][box] = place
            if self.dtypes.setdefault(box.name, dtypes[place.stem, place.name]) != dtypes[place.stem, place.name]:
                raise self._damaged(f"parts of {box.name} have different types")

    @torch.no_grad()
    def read(self, box: Box) -> torch.Tensor:
        """The values of a box, assembled from the parameters that hold it."""
        out = torch.empty(box.shape, dtype=self.dtypes[box.name])
        for held, place in self._places[box.name].items():
            common = box.intersect(held)
            if common is not None:
                path, region = self._path(place.stem, place.name), place.piece.within(common)
                out[common.within(box)].copy_(self._mapped.read(path, place.name, region).view(common.shape))
        return out

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """All stored boxes except padding; those that several ranks hold come more than once."""
        for own, parameters in self._parameters.items():
            for name, parameter in parameters.items():
                for piece in parameter.pieces:
                    values = self._mapped.read(self._path(own, name), name, piece.region)
                    yield piece.box, values.view(piece.box.shape)

    def check_sums(self) -> None:
        """Compare every file with its checksum; ValueError when one has changed since it was written."""
        found = sha256_of_each([self.path / name for name in self._files])
        for (name, file), checksum in zip(self._files.items(), found, strict=True):
            if checksum != file.sha256:
                raise self._damaged(f"{name} has changed since it was written, its checksum differs")

    def _record(self) -> dict[str, Any]:
        path = self.path / MEGATRON
        if not path.is_file():
            raise ValueError(f"{self.path} is not a Megatron folder, it has no {MEGATRON}")
        try:
            record = json.loads(path.read_text())
            version = record.get("version")
        except (ValueError, AttributeError) as err:
            raise self._damaged(f"{MEGATRON} cannot be read: {err}") from None
        if version != VERSION:
            raise ValueError(f"{path} has version {version!r}, this mgrpo reads {VERSION}; convert the model again")
        return record

    def _path(self, own: str, name: str) -> Path:
        return self.path / self._file_of[own][name]

    def _dtype(self, own: str, name: str) -> torch.dtype:
        """Type of a stored parameter, whose shape must be the one that the layout implies."""
        dtype, found = self._mapped.header(self._path(own, name), name)
        expected = self._parameters[own][name].shape
        if found != expected:
            raise self._damaged(
                f"{name} in {self._file_of[own][name]} has shape {list(found)} instead of {list(expected)}"
            )
        return dtype

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is damaged: {what}; convert the model again")
