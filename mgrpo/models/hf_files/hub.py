"""Models by their names on the Hugging Face Hub: found in this machine's cache (`HF_HOME`), or downloaded into it.

Only files that training reads are downloaded: configurations, tokenizer, chat templates, safetensors; never code or pickles.
`python -m mgrpo.models.hf_files.hub NAME COMMIT PART` prints the folder, for processes that must stay offline themselves.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mgrpo.models.hf_files.checksums import sha256_of
from mgrpo.models.hf_files.weight_files import INDEX

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

Part = Literal["model", "served", "tokenizer", "config", "adapter"]
"""The part of a repository that is needed; a model comes with its tokenizer, and "served" is a model without its weights."""
_TOKENIZER = (
    *("config.json", "generation_config.json", "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece*.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
MODEL_FILES = (*_TOKENIZER, "README.md", "LICENSE*", "NOTICE*", "*.safetensors", INDEX)
"""Patterns of the files that make a model."""
_PATTERNS: Mapping[Part, tuple[str, ...]] = {
    "model": MODEL_FILES,
    "served": _TOKENIZER,
    "tokenizer": _TOKENIZER,
    "config": ("config.json",),
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
}
_ELSEWHERE = ("*/*.safetensors", "consolidated*")
"""Weights for other programs, in addition to the model's own."""
_NEEDED: Mapping[Part, tuple[str, ...]] = {
    "model": ("config.json",),
    "served": ("config.json",),
    "tokenizer": ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    "config": ("config.json",),
    "adapter": ("adapter_config.json",),
}
"""One of these must be there."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FOLDER = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,99}")
"""A commit, as it names a folder of the cache."""
_ANSWER_S = 30.0
"""Seconds that the Hub may take to list a repository."""


class HubError(ValueError):
    """Reason why a name leads to no folder, in one sentence that begins with the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSnapshot:
    """Files of one commit of a repository, on this machine."""

    name: str
    """OWNER/NAME."""
    commit: str
    """40 hexadecimal digits."""
    part: Part
    folder: Path
    """Holds at least the files of `part`."""


def fetch(name: str, *, revision: str | None = None, part: Part = "model") -> HubSnapshot:
    """Snapshot of `name`, downloaded if this machine lacks part of it. Processes of a machine wait for each other.

    Args:
        revision: branch, tag or commit; None: main. The cache serves when the Hub does not answer.
    Raises:
        HubError: it could not be found or downloaded.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RevisionNotFoundError

    if _COMMIT.fullmatch(revision or "") and (found := _cached(name, revision, part)):
        return found
    try:
        info = HfApi(library_name="mgrpo").model_info(name, revision=revision, files_metadata=True, timeout=_ANSWER_S)
    except HFValidationError as err:
        raise HubError(f"{name} is neither a folder nor a name that the Hub could have: {_line(err)}") from None
    except Exception as err:
        found = None if isinstance(err, RevisionNotFoundError) else _cached(name, revision, part)
        if found is None:
            raise HubError(f"{name} {'; '.join(_why_not(err, name, revision))}") from None
        if not isinstance(err, OfflineModeIsEnabled):
            why = f"the Hub cannot be asked ({type(err).__name__}: {_line(err)})"
            _say(f"{name} is taken from the cache, commit {found.commit[:7]}: {why}")
        return found
    if odd := _odd(info):
        raise HubError(f"{name} could not be found: {constants.ENDPOINT} answers with {odd}, as the Hub does not")
    assert info.sha is not None
    sizes = _wanted(info, part)
    if problem := _lacks(info, sizes, part):
        raise HubError(f"{name} {problem}")
    with _only_one(name):
        missing = _missing(name, info.sha, sizes)
        if missing:
            _download(name, info.sha, revision, sizes, missing, part)
            _compare(info, missing)
        _remember(name, info.sha, revision)
    return HubSnapshot(name=name, commit=info.sha, part=part, folder=_folder(name, info.sha))


def _download(
    name: str, commit: str, revision: str | None, sizes: Mapping[str, int], missing: Mapping[str, int], part: Part
) -> None:
    from huggingface_hub import constants, snapshot_download

    needed, cache = sum(missing.values()), Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if needed > free:
        raise HubError(
            f"{name} needs {_size(needed)} in {cache}, which has {_size(free)} left; make room there, or set HF_HOME to a "
            "folder on a larger disk"
        )
    there = "" if len(missing) == len(sizes) else f" of {len(sizes)}; the others are there"
    at = f"{revision or 'main'}, commit {commit[:7]}" if revision != commit else f"commit {commit[:7]}"
    files = "file" if len(missing) == 1 else "files"
    _say(f"downloading {name} ({at}) into {cache}: {_size(needed)} in {len(missing)} {files}{there}")
    began = time.monotonic()
    try:
        with _progress():
            snapshot_download(name, revision=commit, allow_patterns=[*_PATTERNS[part]], ignore_patterns=[*_ELSEWHERE])
    except Exception as err:
        raise HubError(f"{name} {'; '.join(_why_not(err, name, revision))}") from None
    if left := _missing(name, commit, sizes):
        raise HubError(f"{name} could not be downloaded: {', '.join(left)} did not arrive; start again")
    _say(f"downloaded {name} in {time.monotonic() - began:.1f} s")


def _compare(info: ModelInfo, arrived: Iterable[str]) -> None:
    """Compare files with the repository's record of them, and delete those that differ: the next start would accept them."""
    assert info.sha is not None
    folder, wrong = _folder(info.id, info.sha), []
    for file in info.siblings or ():
        path = folder / file.rfilename
        if file.rfilename in arrived and not _is_as_recorded(path, file):
            wrong.append(file.rfilename)
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    if wrong:
        raise HubError(
            f"{info.id} could not be downloaded: {', '.join(wrong)} arrived damaged and was deleted; start again"
        )


def _is_as_recorded(path: Path, file: RepoSibling) -> bool:
    if file.size not in (None, path.stat().st_size):
        return False
    if file.lfs:
        return sha256_of(path) == file.lfs.sha256
    if file.blob_id is None:
        return True
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == file.blob_id


def _odd(info: ModelInfo) -> str:
    """Part of an answer in another form than the Hub's; empty if there is none. Mirrors name commits otherwise, and no sizes."""
    if not isinstance(info.sha, str) or not _FOLDER.fullmatch(info.sha):
        return f"commit {str(info.sha)[:60]}"
    for file in info.siblings or ():
        if file.size is not None and (type(file.size) is not int or file.size < 0):
            return f"{str(file.rfilename)[:60]} of {str(file.size)[:60]} bytes"
    return ""


def _remember(name: str, commit: str, revision: str | None) -> None:
    """Record the commit of a branch or tag for when the Hub does not answer; the client records it only for its own requests."""
    path = _repository(name) / "refs" / (revision or "main")
    with suppress(OSError):
        if revision != commit and not (path.is_file() and path.read_text() == commit):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit)


def _wanted(info: ModelInfo, part: Part) -> dict[str, int]:
    """Bytes to download for each file of a repository that `part` needs."""
    from huggingface_hub.utils import filter_repo_objects

    # The cache keeps each content once: one that another commit has is linked to.
    blobs = _repository(info.id) / "blobs"
    sizes = {
        file.rfilename: 0 if (blobs / str(file.lfs.sha256 if file.lfs else file.blob_id)).is_file() else file.size or 0
        for file in info.siblings or ()
    }
    names = filter_repo_objects(sizes, allow_patterns=[*_PATTERNS[part]], ignore_patterns=[*_ELSEWHERE])
    return {name: sizes[name] for name in names}


def _lacks(info: ModelInfo, sizes: Mapping[str, int], part: Part) -> str | None:
    """Reason why a repository lacks the files of `part`."""
    everything = [file.rfilename for file in info.siblings or ()]
    if not any(name in sizes for name in _NEEDED[part]):
        needed = {"tokenizer": "files of a tokenizer (tokenizer.json)"}.get(part, _NEEDED[part][0])
        if part == "model" and "adapter_config.json" in everything:
            return "holds an adapter without its model; give the model, and this name as lora_adapter_path"
        holds = ", ".join(everything[:5]) + ", ..." * (len(everything) > 5)
        return f"has no {needed} on the Hub; it holds {holds or 'nothing'}"
    if part in ("model", "adapter") and not any(name.endswith(".safetensors") for name in sizes):
        others = [name for name in everything if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))]
        holds = f", only {', '.join(others[:3])}{', ...' * (len(others) > 3)}" if others else ""
        return (
            f"has no safetensors on the Hub{holds}; pickles are never loaded: look for a revision that has safetensors "
            "(often refs/pr/N), or for a copy of the model that has them"
        )
    return None


def _missing(name: str, commit: str, sizes: Mapping[str, int]) -> dict[str, int]:
    folder = _folder(name, commit)
    return {file: size for file, size in sizes.items() if not (folder / file).is_file()}


def _folder(name: str, commit: str) -> Path:
    return _repository(name) / "snapshots" / commit


def _repository(name: str) -> Path:
    """The folder in which the cache keeps a model."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE).expanduser().absolute() / repo_folder_name(repo_id=name, repo_type="model")


def _cached(name: str, revision: str | None, part: Part) -> HubSnapshot | None:
    """The revision in the cache, if all that `part` needs is there."""
    from huggingface_hub import snapshot_download

    try:
        # Compares with the listing of the repository, where an earlier download has left it.
        path = snapshot_download(
            name,
            revision=revision,
            local_files_only=True,
            allow_patterns=[*_PATTERNS[part]],
            ignore_patterns=[*_ELSEWHERE],
        )
    except (OSError, ValueError):
        return None
    folder = Path(path).absolute()
    has_weights = part not in ("model", "adapter") or any(folder.glob("*.safetensors"))
    if not has_weights or not any((folder / file).is_file() for file in _NEEDED[part]):
        return None
    return HubSnapshot(name=name, commit=folder.name, part=part, folder=folder)


def _why_not(err: Exception, name: str, revision: str | None) -> tuple[str, str]:
    """An error of the client as a message to its user: a predicate of the name, and advice."""
    from huggingface_hub import constants, errors

    log_in = "log in with hf auth login, or set HF_TOKEN"
    elsewhere = f"on a machine with network: hf download {name} --local-dir DIR, and give DIR"
    if isinstance(err, errors.OfflineModeIsEnabled):
        return f"is neither a folder nor in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set", elsewhere
    if isinstance(err, errors.GatedRepoError):
        return "is gated", f"accept its conditions at {constants.ENDPOINT}/{name}, and {log_in}"
    if isinstance(err, errors.DisabledRepoError):
        return "has been disabled on the Hub", "choose another model"
    if isinstance(err, errors.RevisionNotFoundError):
        return f"has no revision {revision} on the Hub", _revisions(name)
    status = getattr(getattr(err, "response", None), "status_code", None)
    if isinstance(err, errors.RepositoryNotFoundError) or status in (401, 403):
        token = "this machine's token may not read it" if _has_token() else "no token is set"
        return f"is not a folder, and not on the Hub, or private there and {token}", f"check the name, or {log_in}"
    if isinstance(err, OSError) and err.errno is not None and status is None:
        return f"cannot be written to {constants.HF_HUB_CACHE}: {err.strerror}", "set HF_HOME to another folder"
    what = f"HTTP {status}" if status else f"{type(err).__name__}: {_line(err)}"
    return f"is neither a folder nor in the cache, and {constants.ENDPOINT} does not answer ({what})", elsewhere


def _revisions(name: str) -> str:
    from huggingface_hub import HfApi

    with suppress(Exception):
        refs = HfApi().list_repo_refs(name)
        known = [ref.name for ref in (*refs.branches, *refs.tags)]
        return f"it has {', '.join(known[:10])}{', ...' * (len(known) > 10)}"
    return "leave it out for main"


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


@contextmanager
def _only_one(name: str) -> Iterator[None]:
    """Hold this machine's lock of the model within the block; no lock where the cache cannot be written to."""
    from huggingface_hub.utils import WeakFileLock

    locks = _repository(name).parent / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
    except OSError:
        yield
        return
    if not os.access(locks, os.W_OK):
        yield
        return
    with WeakFileLock(locks / f"mgrpo--{_repository(name).name}.lock"):
        yield


@contextmanager
def _progress() -> Iterator[None]:
    """Bars on a terminal only: a log would hold thousands of lines."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _line(err: object) -> str:
    """First line of an error's message."""
    return next(iter(str(err).strip().splitlines()), "no message").rstrip(".")


def _say(text: str) -> None:
    print(f"mgrpo: {text}", file=sys.stderr, flush=True)


def fetch_apart(snapshot: HubSnapshot) -> str:
    """Folder of the same files on this machine, found by a separate process: engines have no network access.

    Raises:
        HubError: see `fetch`.
    """
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-m", "mgrpo.models.hf_files.hub", snapshot.name, snapshot.commit, snapshot.part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"{snapshot.name}: the process ended with {done.returncode}"]
        raise HubError(f"{said[-1]} (on {socket.gethostname()}, where this engine runs)")
    return done.stdout.strip()


def _main(argv: list[Any]) -> int:
    name, commit, part = argv
    try:
        print(fetch(name, revision=commit, part=part).folder)
    except HubError as err:
        print(err, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
