"""Checksums beside a model: `SHA256SUMS`, as `sha256sum` writes and reads it. Exports have it, other folders need not.

It shows damage, of which safetensors and JSON show little: a flipped bit in a weight is another weight.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)?)")
_WEIGHTS = ".safetensors"
_READ = (_WEIGHTS, ".json", ".jinja", ".model", ".txt")
"""The ends of the names of files that programs read; people may edit the others."""
_CHUNK_BYTES = 16 << 20
_REMEDY = f"copy the folder again, or, if you have changed it yourself, delete {SUMS}"


def sha256_of(path: Path) -> str:
    """Checksum of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_sums(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the checksums of the files in `folder`, and of templates one folder below it.

    Args:
        known: checksums that need not be computed, by name.
    """
    files = [path for path in (*folder.iterdir(), *folder.glob("*/*.jinja")) if path.name.endswith(_READ)]
    names = [str(path.relative_to(folder)) for path in files]
    # Weights come last: where the list is cut off, one of them is not in it.
    names.sort(key=lambda name: (name.endswith(_WEIGHTS), name))
    lines = [f"{(known or {}).get(name) or sha256_of(folder / name)}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines))


def sum_problems(folder: Path, *, of_weights: bool | None = None, rank: int = 0, world_size: int = 1) -> Iterator[str]:
    """Why the files of a folder are not those that were written, one sentence each; none for a folder without checksums.

    Args:
        of_weights: compare the weights, for which all of them are read, or everything else; None: both.
        rank, world_size: of those that compare the files together, each its share.
    """
    if not (folder / SUMS).exists():
        return
    try:
        sums = _stored(folder)
    except ValueError as err:
        yield str(err)
        return
    if of_weights is not True and (unlisted := [name for name in _weights(folder) if name not in sums]):
        yield f"{folder}: {unlisted[0]} is not in {SUMS}; {_REMEDY}"
    names = [name for name in sums if of_weights in (None, name.endswith(_WEIGHTS))]
    for name in names[rank::world_size]:
        try:
            found = sha256_of(folder / name)
        except OSError as err:
            yield f"{folder}: {name} is in {SUMS} and cannot be read ({err.strerror}); {_REMEDY}"
            continue
        if found != sums[name]:
            yield f"{folder}: {name} has changed since it was written, its checksum differs from that in {SUMS}; {_REMEDY}"


def _stored(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / SUMS).read_text(encoding="ascii").split("\n")
    except (OSError, ValueError) as err:
        raise ValueError(f"{folder}: {SUMS} cannot be read ({err}); {_REMEDY}") from err
    found = [_LINE.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or not found or not all(found):
        raise ValueError(f"{folder}: {SUMS} is damaged; {_REMEDY}")
    return {line[2]: line[1] for line in found if line}


def _weights(folder: Path) -> Iterable[str]:
    return sorted(path.name for path in folder.glob(f"*{_WEIGHTS}"))
