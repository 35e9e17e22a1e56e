"""The files of a Hugging Face folder: the file of each tensor, completeness, damage, and further files.

Of weights only headers are read, 8 bytes of length and then JSON, so that a model of any size is checked at once. Pure:
no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from mgrpo.models.hf_files.checksums import SUMS
from mgrpo.models.hf_files.surplus import HEAD, beside_problems, name_problems, some
from mgrpo.models.placement.boxes import Shape
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors, is_draft, is_left_out

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the types that training reads."""
MEGATRON = "megatron.json"
"""The file that makes a folder one of Megatron weights."""
TORCH_DIST, TORCH_DIST_INDEX, COMMON = "metadata.json", ".metadata", "common.pt"
"""The files of one of Megatron-core's own checkpoints, in its format `torch_dist`."""
TRACKER = "latest_checkpointed_iteration.txt"
"""File with the name of the newest checkpoint in its folder."""
_WEIGHTS = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".distcp",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
)
_TEMPLATES = "additional_chat_templates"
"""A folder that transformers makes for tokenizers with several templates."""
_MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of an element of each type that the library supports."""
_BLOCK_BYTES = 8 << 20
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a header describes it."""

    dtype: str
    """safetensors' name of its type."""
    shape: Shape
    place: tuple[int, int]
    """Its first byte in the file, and the one after the last."""


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """File of a Hugging Face folder for each tensor.

    Raises:
        ValueError: there are no safetensors, or their index is damaged or names a file outside the folder.
    """
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise ValueError(
                f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors are read (pickles are never loaded)"
            )
        return dict.fromkeys(read_header(folder / SINGLE), folder / SINGLE)
    try:
        weight_map = dict(json.loads((folder / INDEX).read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
        raise ValueError(f"{folder}: {INDEX} is damaged: {type(err).__name__}: {err}") from err
    if not weight_map:
        raise ValueError(f"{folder}: {INDEX} is damaged: it lists no tensor")
    for name, file in weight_map.items():
        if not (isinstance(file, str) and _is_inside(PurePosixPath(file))):
            raise ValueError(f"{folder}: {INDEX} has {name} in {file!r:.100}; expected a file in the same folder")
    files = {name: folder / file for name, file in weight_map.items()}
    others = {*files.values()} - {folder / SINGLE}
    if (folder / SINGLE).is_file() and others and all(file.is_file() for file in others):
        raise ValueError(
            f"{folder} holds {SINGLE}, and {INDEX} of other files: transformers reads the one, vLLM the others; delete what is not the model"
        )
    return files


def head_files(folder: str | Path, shape: ModelShape) -> dict[str, Path]:
    """The file of each tensor of draft heads (`ModelShape.draft_layers`); none where the folder was written without them."""
    return {name: path for name, path in tensor_files(folder).items() if is_draft(name, shape)}


def _is_inside(path: PurePosixPath) -> bool:
    return not path.is_absolute() and ".." not in path.parts and path.suffix == ".safetensors" and "\0" not in str(path)


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ValueError if it is not one, or not all of one."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise _incomplete(path, "it is no file")
        with path.open("rb") as file:
            start, size = file.read(8), path.stat().st_size
            length = int.from_bytes(start, "little")
            text = file.read(length) if 8 + length <= size and length <= _MOST_HEADER_BYTES else b""
    except OSError as err:
        raise _incomplete(path, f"it cannot be read ({err.strerror or err})") from err
    if start == _LFS_POINTER[:8]:
        raise _incomplete(path, "it is a Git LFS pointer; fetch the weights: git lfs pull")
    if size < 8 or 8 + length > size:
        raise _incomplete(path, f"it ends after {size:,} bytes, before its header does")
    if length > _MOST_HEADER_BYTES:
        raise _incomplete(path, f"its header has {length:,} bytes, at most {_MOST_HEADER_BYTES:,} are read")
    try:
        entries = json.loads(text, object_pairs_hook=_without_doubles)
        entries.pop("__metadata__", None)
        tensors, places = {}, []
        for name, entry in entries.items():
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
                raise ValueError(f"{name} is {entry}")
            if 8 * (end - begin) != _BITS[dtype] * math.prod(shape):
                raise ValueError(f"{name}, {dtype} {shape}, has {end - begin} bytes")
            tensors[name] = Tensor(dtype, tuple(shape), (8 + length + begin, 8 + length + end))
            places.append((begin, end, name))
        data_bytes = 0
        for begin, end, name in sorted(places):
            if begin != data_bytes or end < begin:
                raise ValueError(f"{name} is in bytes {begin:,} to {end:,}, expected from {data_bytes:,}")
            data_bytes = end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise _incomplete(path, f"its header is damaged ({type(err).__name__}: {str(err)[:200]})") from err
    if 8 + length + data_bytes != size:
        raise _incomplete(path, f"it has {size:,} bytes, its header promises {8 + length + data_bytes:,}")
    return tensors


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(
            f"{some(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)} occurs twice"
        )
    return found


def weight_problems(folder: str | Path, shape: ModelShape | None, *, dtypes: Collection[str] = FLOATS) -> Iterator[str]:
    """Reasons why the weights of a Hugging Face folder cannot be used, one sentence each; all begin with the folder.

    Args:
        shape: expected tensors, except those `left_out`; None: check only that all files are whole.
        dtypes: the types that are allowed.
    """
    try:
        files = tensor_files(folder)
    except ValueError as err:
        yield str(err)
        return
    header, broken = cache(read_header), False
    for path in dict.fromkeys(files.values()):
        try:
            if not os.path.lexists(path):
                raise ValueError(f"{folder} lacks {path.name}, which {INDEX} lists; download it again")
            header(path)
        except ValueError as err:
            broken = True
            yield str(err)
    if broken:
        return
    if absent := [name for name, path in files.items() if name not in header(path)]:
        yield f"{folder} lacks {some(absent)}, which {INDEX} lists in {files[absent[0]].name}; download it again"
        return
    if shape is None:
        return
    expected, found = hf_tensors(shape), {name: header(path)[name] for name, path in files.items()}
    # transformers and vLLM also load tensors that an index does not list.
    stored: dict[str, tuple[Path, Tensor]] = {}
    for path in dict.fromkeys(files.values()):
        for name, tensor in header(path).items():
            first = stored.setdefault(name, (path, tensor))
            if not _same_values(first, (path, tensor)):
                yield f"{folder} holds {name} in {first[0].name} and with other values in {path.name}; take one of them out"
    extra = stored.keys() - expected.keys() - {*_left_out(stored, shape)}
    yield from name_problems(folder, expected.keys() - found.keys(), extra, shape)
    yield from _differences(folder, found, expected, dtypes)
    yield from beside_problems(Path(folder))
    yield from _second_files(Path(folder), expected)


def _second_files(folder: Path, expected: Collection[str]) -> Iterator[str]:
    """Reasons why engines that load a folder themselves would take tensors from another file: without an index vLLM loads every file."""
    others = [] if (folder / INDEX).is_file() else sorted({*folder.glob("*.safetensors")} - {folder / SINGLE})
    for path in others:
        with contextlib.suppress(ValueError):
            if twice := [name for name in read_header(path) if name in expected]:
                yield f"{folder} holds {some(twice)} in {path.name} as well, which vLLM loads beside {SINGLE}; take that file out"


def left_out(folder: str | Path, shape: ModelShape) -> list[str]:
    """Tensors of a whole folder that the model does not use: see `is_left_out`, and the LM head of a tied model if it equals the embedding."""
    paths = dict.fromkeys(tensor_files(folder).values())
    return _left_out({name: (path, tensor) for path in paths for name, tensor in read_header(path).items()}, shape)


def left_out_note(names: Collection[str], folder: str | Path) -> str:
    """Line for the user that names the tensors `left_out`."""
    return (
        f"left out: {some(names)} of {folder}; layers that guess further tokens, tables of RoPE and an LM head equal to the "
        "embedding are no part of the model"
    )


def _left_out(stored: Mapping[str, tuple[Path, Tensor]], shape: ModelShape) -> list[str]:
    names = sorted(name for name in stored if is_left_out(name, shape))
    embedding = stored.get(shape.prefix + "embed_tokens.weight")
    is_twice = shape.tied and HEAD in stored and embedding is not None and _same_values(stored[HEAD], embedding)
    return [*names, *([HEAD] if is_twice else [])]


def _same_values(*both: tuple[Path, Tensor]) -> bool:
    """True if two tensors have the same type, shape and bits."""
    (path, tensor), (other_path, other) = both
    if both[0] == both[1]:
        return True
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    with path.open("rb") as one, other_path.open("rb") as two:
        one.seek(tensor.place[0])
        two.seek(other.place[0])
        left = tensor.place[1] - tensor.place[0]
        while left > 0:
            size = min(left, _BLOCK_BYTES)
            if one.read(size) != two.read(size):
                return False
            left -= size
    return True


def _differences(
    folder: str | Path, found: Mapping[str, Tensor], expected: Mapping[str, Shape], dtypes: Collection[str]
) -> Iterator[str]:
    common = [name for name in expected if name in found]
    if wrong := [name for name in common if found[name].shape != expected[name]]:
        name = wrong[0]
        more = f" (and {len(wrong) - 1} more tensors differ)" if len(wrong) > 1 else ""
        yield (
            f"{folder}: {name} has shape {list(found[name].shape)}, config.json implies {list(expected[name])}{more}; "
            "correct config.json"
        )
    if wrong := [name for name in common if found[name].dtype not in dtypes]:
        yield (
            f"{folder}: {some(wrong)} of type {found[wrong[0]].dtype}; expected one of {', '.join(dtypes)}: "
            "export the weights unquantised"
        )


def is_hf_format(folder: str | Path) -> bool:
    """True for the weights of a Hugging Face folder; the readers of Megatron's formats check their own files.

    Raises:
        ValueError: see `torch_dist_folder`.
    """
    return not (Path(folder) / MEGATRON).is_file() and torch_dist_folder(folder) is None


def torch_dist_folder(path: str | Path) -> Path | None:
    """The folder of a checkpoint of Megatron-core: `path`, or the one in it that its tracker names; None for others.

    Raises:
        ValueError: the tracker names a checkpoint that is not there.
    """
    path = Path(path)
    if (path / TORCH_DIST_INDEX).is_file() and (path / TORCH_DIST).is_file():
        return path
    if not (path / TRACKER).is_file():
        return None
    newest = (path / TRACKER).read_text(errors="replace").strip()[:20]
    found = path / ("release" if newest == "release" else f"iter_{newest.zfill(7)}")
    if not (newest == "release" or newest.isdecimal()) or torch_dist_folder(found) != found:
        raise ValueError(
            f"{path}: {TRACKER} says {newest!r}, but {found.name} is not a checkpoint in format torch_dist"
        )
    return found


def files_beside(folder: Path) -> list[Path]:
    """The files of a model besides its weights and checksums: configurations, tokenizer, chat templates, model card, licence.

    Raises:
        ValueError: one of them is a link that leads out of the folder, whose content could be anything of this machine.
    """
    weights = (
        *_WEIGHTS,
        SUMS,
        "SHA256SUMS",
        MEGATRON,
        TRACKER,
        *([TORCH_DIST] if (folder / TORCH_DIST_INDEX).is_file() else []),
    )
    beside = [
        path
        for path in (*sorted(folder.iterdir()), *sorted(folder.glob(f"{_TEMPLATES}/*")))
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(weights)
    ]
    for path in beside:
        target = path.resolve()
        if not target.is_relative_to(folder.resolve()) and not _is_in_hub_cache(target):
            raise ValueError(f"{folder}: {path.name} is a link to {target}; put a copy of the file in its place")
    return beside


def _is_in_hub_cache(target: Path) -> bool:
    """True if this is in the Hub cache's folder of blobs, to which the folders of its models link."""
    return target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")


def _incomplete(path: Path, why: str) -> ValueError:
    return ValueError(f"{path.parent}: {path.name} is not a complete safetensors file: {why}")
