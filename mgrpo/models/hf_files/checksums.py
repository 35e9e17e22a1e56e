"""Checksums of a model's files: `mgrpo.sha256`, which `sha256sum` also reads. Exports have it, other folders need not; a list of
another name belongs to another tool, and may list absent files.

It detects damage, most of which safetensors and JSON do not: a flipped bit in a weight is another weight.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

SUMS = "mgrpo.sha256"
_WEIGHTS = ".safetensors"
_READ = (_WEIGHTS, ".json", ".jinja", ".model", ".txt")
"""The ends of the names of files that programs read; people may edit the others."""
_CHAR = r"[^/\\\n\r\0]"
_LINE = re.compile(
    rf"([0-9a-f]{{64}})  ({_CHAR}*(?:{'|'.join(map(re.escape, _READ))})|(?!\.\.?/){_CHAR}+/{_CHAR}*\.jinja)"
)
"""`sha256sum` writes names with backslashes and line ends in another form; they are left out."""
_CHUNK_BYTES = 16 << 20
_TOLD_BYTES = 1 << 30
"""Bytes above which a line explains the wait."""
THREADS = 4
"""Threads that read and hash files."""
_REMEDY = f"copy the folder again, or, if you have changed it yourself, delete {SUMS}"


def sha256_of(path: Path) -> str:
    """Checksum of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_of_each(paths: Sequence[Path]) -> Iterator[str]:
    """Checksums of files, in their order, read in several threads: one takes 1.4 GB a second, and storage gives more."""
    with ThreadPoolExecutor(THREADS) as threads:
        yield from threads.map(sha256_of, paths)


def write_sums(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the checksums of the files in `folder`, and of templates one folder below it.

    Args:
        known: checksums that need not be computed, by name.
    """
    files = [path for path in (*folder.iterdir(), *folder.glob("*/*.jinja")) if path.is_file()]
    names = [name for path in files if _LINE.fullmatch(f"{'0' * 64}  {(name := str(path.relative_to(folder)))}")]
    # Weights come last: where the list is cut off, one of them is not in it.
    names.sort(key=lambda name: (name.endswith(_WEIGHTS), name))
    sums = dict(known or {})
    unknown = [name for name in names if name not in sums]
    sums |= zip(unknown, sha256_of_each([folder / name for name in unknown]), strict=True)
    lines = [f"{sums[name]}  {name}\n" for name in names]
    (folder / SUMS).write_bytes(os.fsencode("".join(lines)))


def sum_problems(folder: Path, *, of_weights: bool | None = None, rank: int = 0, world_size: int = 1) -> Iterator[str]:
    """Differences between a folder's files and their checksums, one sentence each; none for a folder without checksums.

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
    num_bytes = sum(os.path.getsize(folder / name) for name in names if os.path.isfile(folder / name))
    if rank == 0 and num_bytes > _TOLD_BYTES:
        text = f"comparing {num_bytes / 1e9:.1f} GB in {folder} with their checksums"
        print(f"mgrpo: {text}", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(max(1, THREADS // world_size)) as pool:
        yield from filter(None, pool.map(partial(_problem, folder, sums), names[rank::world_size]))


def _problem(folder: Path, sums: Mapping[str, str], name: str) -> str | None:
    try:
        found = sha256_of(folder / name)
    except OSError as err:
        return f"{folder}: {name} is in {SUMS} and cannot be read ({err.strerror}); {_REMEDY}"
    if found != sums[name]:
        return f"{folder}: {name} has changed since it was written, its checksum differs from that in {SUMS}; {_REMEDY}"
    return None


def _stored(folder: Path) -> dict[str, str]:
    try:
        lines = os.fsdecode((folder / SUMS).read_bytes()).split("\n")
    except OSError as err:
        raise ValueError(f"{folder}: {SUMS} cannot be read ({err}); {_REMEDY}") from err
    found = [_LINE.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or not found or not all(found):
        raise ValueError(f"{folder}: {SUMS} is damaged; {_REMEDY}")
    return {line[2]: line[1] for line in found if line}


def _weights(folder: Path) -> Iterable[str]:
    return sorted(path.name for path in folder.glob(f"*{_WEIGHTS}"))
