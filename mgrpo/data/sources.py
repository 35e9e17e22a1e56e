"""Where rows come from: files, folders, names of data sets, and Python. Each becomes a `Source` of checked rows.

Small ones are held in memory and read anew at every start. Large ones are read once, into a table of the cache, and found
there by a hash of their bytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mgrpo.data.cache import Cache
from mgrpo.data.checking import RECORDS_A_BATCH, Checked, Summary, check_lines, check_records, check_task
from mgrpo.data.pieces import Piece, file_digest, jsonl_pieces, parquet_batches, parquet_shape
from mgrpo.data.progress import progress_bar
from mgrpo.data.rows import Contract
from mgrpo.data.tables import Table, Writer, row_batches
from mgrpo.data.workers import cores, do_all

_log = logging.getLogger(__name__)

# Part of every key of the cache: another number where the same bytes would give other rows.
_ROWS_VERSION = 1
_DATA_SUFFIXES = (".jsonl", ".ndjson", ".parquet", ".json", ".csv")

Content = Mapping[str, Any]
"""What tells the rows of one source from those of another, in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From which size on data are kept in tables, and prepared by several processes."""

    num_proc: int = 0
    """0: one for each core."""
    table_bytes: int = 16 * 2**20
    table_rows: int = 20_000
    pool_bytes: int = 64 * 2**20
    pool_rows: int = 50_000

    @property
    def num_workers(self) -> int:
        """Processes for data that are worth more than one."""
        return self.num_proc or cores()


@dataclass(slots=True, kw_only=True)
class Source:
    """Checked rows, in memory or in tables of the cache."""

    name: str
    key: dict[str, Any]
    """What the rows were made of, in JSON: equal keys, equal rows."""
    summary: Summary
    checked: Checked | None = None
    files: list[Path] = field(default_factory=list)
    _table: Table | None = None

    @property
    def table(self) -> Table:
        """The rows (`line`, `text`)."""
        if self._table is None:
            self._table = Table.open(self.files) if self.checked is None else Table(list(row_batches(self.checked)))
            self.checked = None
        return self._table

    def origin(self, line: int | None) -> str:
        """A row's place, for messages."""
        return f"{self.name}:{line}"


def read_source(name: str, split: str, *, contract: Contract, cache: Cache, scale: Scale) -> Source:
    """Read and check a file (any split will do), a folder, or what `datasets` finds by this name.

    Bad rows are in the source's summary; a source that cannot be read at all is a ValueError.
    """
    reader = _Reader(name, split, contract, cache, scale)
    path = Path(name)
    if path.is_dir():
        return reader.read_folder(path)
    if path.is_file():
        return reader.read_file(path)
    if path.suffix in _DATA_SUFFIXES or path.is_absolute():
        raise ValueError(f"data file {name} does not exist (looked for {path.absolute()})")
    return reader.read_loaded(None, name, split=split)


def read_dataset(dataset: Iterable[Mapping], *, contract: Contract, cache: Cache, scale: Scale) -> Source:
    """Check rows that the caller brings: a data set of `datasets`, or any iterable of dicts."""
    reader = _Reader("dataset", "", contract, cache, scale)
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset)) or "nothing"
        raise ValueError(f"dataset is a mapping of {names}, expected rows; pass one split, or a list of dicts")
    if isinstance(dataset, (str, bytes)) or not isinstance(dataset, Iterable):
        raise ValueError(f"dataset is {type(dataset).__name__}, expected a list of dicts or a Dataset")
    if hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format"):
        if (dataset.format or {}).get("type") != "custom":
            return reader.read_arrow(dataset, {"fingerprint": dataset._fingerprint})
        # Made by a function of the user when they are asked for.
        return reader.read_records(dataset, len(dataset))
    return reader.read_records(dataset, len(dataset) if isinstance(dataset, Sequence) else None)


@dataclass(frozen=True, slots=True)
class _Reader:
    name: str
    split: str
    contract: Contract
    cache: Cache
    scale: Scale

    def read_file(self, path: Path) -> Source:
        if path.suffix == ".parquet":
            return self._read_parquet(path)
        if path.suffix == ".json" and _first_byte(path) == b"[":
            return self._read_json(path)
        if path.suffix in (".jsonl", ".ndjson", ".json"):
            return self._read_jsonl(path)
        # `datasets` knows a file's kind by its suffix.
        content = {"file": file_digest(path), "suffixes": path.suffixes}
        return self.read_loaded(content, str(path.absolute().parent), data_files=path.name, split="train")

    def read_folder(self, path: Path) -> Source:
        content = {"folder": _folder_digest(path), "split": self.split}
        if not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return self.read_loaded(content, self.name, split=self.split)
        if found := self._found(content):
            return found
        datasets = self._datasets()
        try:
            saved = datasets.load_from_disk(str(path))
        except Exception as err:
            raise ValueError(
                f"{path} was not written by save_to_disk, or is damaged: {type(err).__name__}: {err}"
            ) from err
        if isinstance(saved, Mapping):
            if self.split not in saved:
                raise ValueError(f"{path} has no split {self.split!r}; it has {', '.join(saved)}")
            saved = saved[self.split]
        return self.read_arrow(saved, content)

    def read_loaded(self, content: Content | None, path: str, **options: str) -> Source:
        """What `datasets.load_dataset` opens; it knows the content where nobody else does."""
        if content is not None and (found := self._found(content)):
            return found
        datasets = self._datasets()
        try:
            dataset = datasets.load_dataset(path, **options)
        except Exception as err:
            what = (
                "is a file or folder that" if Path(self.name).exists() else "is no file or folder here, and as a name"
            )
            raise ValueError(
                f"{self.name} {what} could not be loaded (split {options['split']!r}): {type(err).__name__}: {err}"
            ) from err
        return self.read_arrow(dataset, content or {"fingerprint": dataset._fingerprint})

    def read_arrow(self, dataset: Any, content: Content) -> Source:
        """A data set of `datasets`."""
        # Pictures and sounds are decoded when they are read, and nobody here looks at them.
        media = [
            name
            for name, kind in (dataset.features or {}).items()
            if getattr(kind, "decode", False) and type(kind).__name__ != "Json"
        ]
        dataset = dataset.with_format(None).remove_columns(media)
        rows = (
            dict(zip(batch, values, strict=True))
            for batch in dataset.iter(batch_size=RECORDS_A_BATCH)
            for values in zip(*batch.values(), strict=True)
        )
        source = self.read_records(rows, len(dataset), content)
        source.summary.lost_columns += [name for name in media if name not in source.summary.lost_columns]
        return source

    def read_records(self, records: Iterable[object], num_rows: int | None, content: Content | None = None) -> Source:
        """Rows that only this process can read; without `content` they themselves are what they are known by."""
        records = iter(records)
        if num_rows is None:
            head = list(itertools.islice(records, self.scale.table_rows + 1))
            records, num_rows = itertools.chain(head, records), len(head)
        if num_rows <= self.scale.table_rows:
            checked = check_records(records, first=1, contract=self.contract)
            return self._in_memory(content or {"rows": _digest(checked.texts).hexdigest()}, checked)

        def write(folder: Path) -> tuple[Content, Summary]:
            summary, known_by = Summary(), hashlib.sha256()
            with (
                Writer(folder / "rows-00000.arrow") as writer,
                progress_bar(f"reading {self.name}", num_rows) as bar,
            ):
                for first, chunk in _chunks(records):
                    checked = check_records(chunk, first=first, contract=self.contract)
                    for batch in row_batches(checked):
                        writer.add(batch)
                    summary.extend(checked.summary)
                    if content is None:
                        known_by.update(_digest(checked.texts).digest())
                    bar(len(chunk))
            return content or {"rows": known_by.hexdigest()}, summary

        return self._in_table(content, write)

    def _read_jsonl(self, path: Path) -> Source:
        if path.stat().st_size <= self.scale.table_bytes:
            data = path.read_bytes()
            checked = check_lines(data, first_line=1, contract=self.contract)
            return self._in_memory({"jsonl": hashlib.sha256(data).hexdigest()}, checked)
        return self._in_pieces(path, "jsonl", lambda: jsonl_pieces(path))

    def _read_parquet(self, path: Path) -> Source:
        shape = parquet_shape(path)
        if shape.holds_json:
            # Only `datasets` knows which of its columns are JSON in disguise.
            return self.read_loaded(
                {"parquet": file_digest(path)}, str(path.absolute().parent), data_files=path.name, split="train"
            )
        if shape.num_rows > self.scale.table_rows:
            return self._in_pieces(path, "parquet", lambda: (file_digest(path), shape.pieces))
        records = (record for batch in parquet_batches(path) for record in batch)
        return self.read_records(records, shape.num_rows, {"parquet": file_digest(path)})

    def _read_json(self, path: Path) -> Source:
        data = path.read_bytes()
        try:
            records = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as err:
            raise ValueError(f"{path} cannot be read as JSON: {err}") from err
        return self.read_records(records, len(records), {"json": hashlib.sha256(data).hexdigest()})

    def _in_pieces(self, path: Path, kind: str, look: Callable[[], tuple[str, list[Piece]]]) -> Source:
        """A large file, checked by several processes; `look` hashes and cuts it."""
        before = path.stat()
        known_by, pieces = look()
        content = {kind: known_by}

        def write(folder: Path) -> tuple[Content, Summary]:
            tasks = [
                {"path": str(path), "out": str(folder / f"rows-{number:05}.arrow"), "contract": asdict(self.contract)}
                | piece
                for number, piece in enumerate(pieces)
            ]
            is_worth_it = before.st_size >= self.scale.pool_bytes
            summary = Summary()
            with progress_bar(f"reading {self.name}", len(tasks)) as bar:
                for answer in do_all(
                    tasks,
                    here=check_task,
                    kind="check",
                    num_workers=min(self.scale.num_workers, len(tasks)) if is_worth_it else 1,
                    advance=lambda answer: bar(1),
                ):
                    summary.extend(Summary.from_json(answer))
            after = path.stat()
            if (after.st_mtime_ns, after.st_size) != (before.st_mtime_ns, before.st_size):
                raise ValueError(f"{path} was changed while it was read; start again when it is written")
            return content, summary

        return self._in_table(content, write)

    def _in_memory(self, content: Content, checked: Checked) -> Source:
        return Source(name=self.name, key=self._key(content), summary=checked.summary, checked=checked)

    def _in_table(self, content: Content | None, write: Callable[[Path], tuple[Content, Summary]]) -> Source:
        """The table that the cache has for `content`, or else that `write` makes; rows are lost if any is bad."""
        if content is not None and (found := self._found(content)):
            return found
        folder = self.cache.new_folder()
        try:
            content, summary = write(folder)
            key = self._key(content)
            if summary.num_problems:
                shutil.rmtree(folder, ignore_errors=True)
                return Source(name=self.name, key=key, summary=summary, checked=Checked())
            (folder / "summary.json").write_text(json.dumps(summary.to_json()))
            return self._from(self.cache.keep(folder, "rows", key), key)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _found(self, content: Content) -> Source | None:
        key = self._key(content)
        folder = self.cache.find("rows", key)
        return None if folder is None else self._from(folder, key)

    def _from(self, folder: Path, key: dict[str, Any]) -> Source:
        summary = Summary.from_json(json.loads((folder / "summary.json").read_text()))
        files = sorted(folder.glob("rows-*.arrow"))
        return Source(name=self.name, key=key, summary=summary, files=files)

    def _key(self, content: Content) -> dict[str, Any]:
        return {"version": _ROWS_VERSION, "content": dict(content), "contract": asdict(self.contract)}

    def _datasets(self) -> Any:
        if importlib.util.find_spec("datasets") is None:
            raise ValueError(f"{self.name} needs the package datasets: pip install 'mgrpo[data]', or use a .jsonl file")
        import datasets

        return datasets


def _chunks(records: Iterator[object]) -> Iterator[tuple[int, list[object]]]:
    """The number of the first record, and a few records."""
    number = 1
    while chunk := list(itertools.islice(records, RECORDS_A_BATCH)):
        yield number, chunk
        number += len(chunk)


def _digest(texts: Iterable[str]) -> Any:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode() + b"\n")
    return found


def _folder_digest(folder: Path) -> str:
    """A hash of the names and the bytes of all files that are not hidden."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            found.update(f"{relative}\n{file_digest(path)}\n".encode())
    return found.hexdigest()


def _first_byte(path: Path) -> bytes:
    """The first byte that is no white space."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
