"""A model as a Hugging Face folder: its weights, tensor by tensor, and its other files.

Conversions must lose nothing, so types that training does not read are kept as they are. Training, which needs only its
own slices, reads through `policy.weights`. Both refuse a folder whose tensors are not those that its config.json implies.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from mgrpo.checkpoint.folder import LocalFolder
from mgrpo.checkpoint.mapped import MappedFiles
from mgrpo.checkpoint.shard import DTYPES, FILE_BYTES, split, write_tensors
from mgrpo.models.hf_files.checksums import write_sums
from mgrpo.models.hf_files.weight_files import INDEX, SINGLE, files_beside, left_out, tensor_files, weight_problems
from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.models.placement.mlp_rows import is_frozen
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors
from mgrpo.policy.weights import Read

_BLOCK_BYTES = 2 << 20

Header = tuple[torch.dtype, Shape]
Tell = Callable[[int], object]
"""Called with the number of bytes that were written since the last call."""


class HfFolder:
    """The weights of a Hugging Face folder.

    Raises:
        ValueError: a tensor is missing, is not part of `shape`, or has another shape or a type that cannot be kept.
    """

    def __init__(self, path: str | Path, shape: ModelShape) -> None:
        self.path, self._files = Path(path), MappedFiles()
        if problems := list(weight_problems(path, shape, dtypes=DTYPES)):
            raise ValueError("; ".join(problems))
        self._places = tensor_files(path)
        self.shapes = hf_tensors(shape)
        self.dtypes = {name: self._files.header(self._places[name], name)[0] for name in self.shapes}
        self.left_out = left_out(path, shape)
        """Tensors that the model does without."""

    def read(self, box: Box) -> torch.Tensor:
        """The values of a box."""
        region = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        return self._files.read(self._places[box.name], box.name, region)

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Every tensor."""
        for name, shape in self.shapes.items():
            box = Box(name, (0,) * len(shape), shape)
            yield box, self.read(box)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have the same type, shape and bits: 0 differs from -0, and NaN equals itself."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def write_hf(
    read: Read,
    shape: ModelShape,
    dtypes: Mapping[str, torch.dtype],
    folder: Path,
    *,
    file_bytes: int = FILE_BYTES,
    tell: Tell = lambda num_bytes: None,
) -> None:
    """Write a model's weights to the folder with its other files, and their checksums; one block of rows is in memory at a time.

    Args:
        read: gives the values of a box, which are rounded to the tensor's type in `dtypes` where they differ.
    """
    tensors = {name: (dtypes[name], full) for name, full in hf_tensors(shape).items()}

    def values(name: str) -> Iterator[torch.Tensor]:
        for rows in row_blocks(name, tensors[name]):
            block = read(rows).to(dtypes[name])
            tell(block.nbytes)
            yield block

    write_sums(folder, write_weights(tensors, values, folder, file_bytes=file_bytes))


def write_weights(
    tensors: Mapping[str, Header],
    values: Callable[[str], Iterable[torch.Tensor]],
    folder: Path,
    *,
    file_bytes: int = FILE_BYTES,
) -> dict[str, str]:
    """Write tensors to the files of a Hugging Face folder, with an index when one file does not hold them.

    Args:
        values: gives a tensor in blocks of rows, each of which is written before the next is requested.
    Returns:
        The checksum of each file of tensors.
    """
    files = split(tensors, file_bytes, size=lambda name: header_bytes(tensors[name]))
    weight_map: dict[str, str] = {}
    sums: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with LocalFolder(folder).create(file) as stream:
            headers = {name: tensors[name] for name in names}
            sums[file] = write_tensors(stream, headers, values, metadata={"format": "pt"}).sha256
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        total = sum(map(header_bytes, tensors.values()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        LocalFolder(folder).replace(INDEX, json.dumps(index, indent=1).encode())
    return sums


def row_blocks(name: str, header: Header, block_bytes: int = _BLOCK_BYTES) -> Iterator[Box]:
    """A tensor of at least one dimension in blocks of whole rows that are small enough to copy."""
    dtype, shape = header
    step = max(block_bytes // max(header_bytes((dtype, shape[1:])), 1), 1)
    for start in range(0, shape[0], step):
        yield Box(name, (start, *[0] * (len(shape) - 1)), (min(step, shape[0] - start), *shape[1:]))


def tensor_dtypes(shape: ModelShape, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type of each tensor of a checkpoint in `dtype`: untrained tensors are float32."""
    return {name: torch.float32 if is_frozen(name) else dtype for name in hf_tensors(shape)}


def header_bytes(header: Header) -> int:
    """Size of a tensor's values."""
    return header[0].itemsize * Box("", (), header[1]).size


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type in config.json."""
    return str(dtype).removeprefix("torch.")


def carry(source: Path, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Copy the files beside the weights, see `files_beside`.

    Args:
        dtype: is written into config.json; None leaves config.json unchanged.
    """
    for path in files_beside(source):
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    if dtype is not None:
        config = json.loads((folder / "config.json").read_text())
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        config |= dict.fromkeys(keys, dtype_name(dtype))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the context ends without an error, and is deleted otherwise.

    Raises:
        ValueError: `out` exists and is not empty.
    """
    out = Path(os.path.abspath(out))
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists already; name a new folder, or empty it")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    new = [path for path in partial.parents if not path.exists()]
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, out)  # replaces an empty folder
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for path in new:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
