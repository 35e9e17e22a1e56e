"""Sources of rows: files, folders, names of datasets, and Python. Each becomes a `DataSource` of checked rows.

JSON and JSONL are read here, so that bad lines have their numbers; everything else is read by `datasets`. A source is
identified by its content. The check of a large one is cached; its rows are read again when they become prompts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.data.cache import Cache
from mgrpo.data.checking import Row, Summary, rows_of_lines, rows_of_records
from mgrpo.data.rows import PROMPT, VERIFIERS, Contract

# Part of every key of the cache: another number where the same bytes would give other rows.
_ROWS_VERSION = 4
_DATA_SUFFIXES = (".jsonl", ".ndjson", ".parquet", ".json", ".csv")
# The check of a source above either size is cached.
_KEPT_BYTES = 4 * 2**20
_KEPT_ROWS = 20_000
_BATCH_ROWS = 1000
_BLOCK = 2**20

Content = Mapping[str, Any]
"""The identity of one source's rows, in JSON: it differs where the rows do."""
Reader = Callable[[], Iterable[Row]]
Stamp = Sequence[tuple[str, int, int]]
"""Name, time and size of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Checked rows."""

    name: str
    key: Mapping[str, Any]
    """The origin of the rows, in JSON: equal keys, equal rows."""
    summary: Summary
    rows: Reader
    """Reads the rows, from the first; all are good unless the summary has problems."""

    def origin(self, line: int | None) -> str:
        """A row's place, for messages."""
        return f"{self.name}:{line}"

    def taken(self, wanted: np.ndarray) -> Iterator[Row]:
        """The rows at these indices, in the order of the source."""
        is_wanted = np.zeros(self.summary.num_rows, dtype=bool)
        is_wanted[wanted] = True
        # To the end in any case, where a file that has changed is noticed.
        for index, row in enumerate(self.rows() if len(wanted) else ()):
            if index < len(is_wanted) and is_wanted[index]:
                yield row


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReader:
    """Reads and checks sources under one contract."""

    contract: Contract
    cache: Cache

    def named(self, name: str, split: str) -> DataSource:
        """A file (of any split), a folder, or the dataset that `datasets` finds by this name.

        Bad rows are in the source's summary; a source that cannot be read at all is a ValueError.
        """
        path = Path(name)
        if path.exists():
            return self._local(path, name, split)
        if path.suffix in _DATA_SUFFIXES or path.is_absolute():
            raise ValueError(f"data file {name} does not exist (looked for {path.absolute()})")
        try:
            dataset, is_csv = _load(name, split=split)
        except Exception as err:
            raise ValueError(
                f"{name} is neither a file nor a folder, and could not be loaded as the name of a dataset "
                f"(split {split!r}): {type(err).__name__}: {err}"
            ) from err
        return self._arrow(name, dataset, is_csv=is_csv)

    def given(self, name: str, dataset: Iterable[Mapping[str, object]]) -> DataSource:
        """Rows from Python: a `Dataset`, or a table or any iterable of dicts, whose rows are then held in memory."""
        if isinstance(dataset, Mapping):
            columns = ", ".join(map(str, dataset)) or "nothing"
            raise ValueError(f"{name} is a mapping of {columns}, expected rows; pass one split, or a list of dicts")
        is_table = hasattr(dataset, "__arrow_c_stream__")
        if isinstance(dataset, (str, bytes)) or not (is_table or isinstance(dataset, Iterable)):
            raise ValueError(f"{name} is {type(dataset).__name__}, expected a list of dicts or a Dataset")
        if _is_arrow(dataset):
            return self._arrow(name, dataset)
        summary, digest = Summary(), hashlib.sha256()
        rows = list(summary.good(rows_of_records(_records(dataset), self.contract), self.contract))
        for row in rows:
            digest.update(row.text.encode() + b"\n")
        key = self._key({"rows": digest.hexdigest()})
        return DataSource(name=name, key=key, summary=summary, rows=lambda: rows)

    def _local(self, path: Path, name: str, split: str) -> DataSource:
        stamp = _stamp(path)
        # `datasets` tells a file's kind by its suffix.
        content = {"digest": _digest(path), **({"split": split} if path.is_dir() else {"suffixes": path.suffixes})}
        read = partial(_read_unchanged, path, stamp, partial(_read_local, path, split, self.contract))
        return self._checked(name, content, read, is_large=sum(size for *_, size in stamp) > _KEPT_BYTES)

    def _arrow(self, name: str, dataset: Any, *, is_csv: bool = False) -> DataSource:
        """A `Dataset`, identified by its fingerprint."""
        read = partial(_rows_of_dataset, dataset, self.contract, is_csv=is_csv)
        content = {"fingerprint": dataset._fingerprint}
        return self._checked(name, content, read, is_large=len(dataset) > _KEPT_ROWS)

    def _checked(self, name: str, content: Content, read: Reader, *, is_large: bool) -> DataSource:
        key = self._key(content)
        folder = self.cache.find("checked", key) if is_large else None
        if folder is not None:
            summary = Summary.from_json(json.loads((folder / "summary.json").read_text()))
            return DataSource(name=name, key=key, summary=summary, rows=read)
        summary = Summary()
        for _ in summary.good(read(), self.contract):
            pass
        if is_large and not summary.num_problems:
            text = json.dumps(summary.to_json())
            self.cache.make("checked", key, lambda folder: (folder / "summary.json").write_text(text))
        return DataSource(name=name, key=key, summary=summary, rows=read)

    def _key(self, content: Content) -> dict[str, Any]:
        return {"version": _ROWS_VERSION, "content": dict(content), "contract": asdict(self.contract)}


def _is_arrow(dataset: object) -> bool:
    """True for a `Dataset` that gives the same rows whenever it is read."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(dataset, datasets.Dataset):
        return False
    # "custom": a function of the user makes the rows.
    return (dataset.format or {}).get("type") != "custom"


def _records(dataset: Any) -> Iterable[object]:
    """The rows of a table of pandas, polars or pyarrow, without its missing values; anything else as it is."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(dataset, pandas.DataFrame):
        return dataset.astype(object).where(dataset.notna(), None).to_dict("records")
    if hasattr(dataset, "__arrow_c_stream__"):
        import pyarrow

        return pyarrow.table(dataset).to_pylist()
    return dataset


def _read_unchanged(path: Path, stamp: Stamp, read: Reader) -> Iterator[Row]:
    yield from read()
    if _stamp(path) != stamp:
        raise ValueError(f"{path} changed while it was in use; start again when it is complete")


def _read_local(path: Path, split: str, contract: Contract) -> Iterator[Row]:
    if path.suffix == ".json" and _first_byte(path) == b"[":
        try:
            records = json.loads(path.read_bytes().decode("utf-8-sig"))
        except (ValueError, RecursionError) as err:
            raise ValueError(f"{path} cannot be read as JSON: {err}") from err
        yield from rows_of_records(records, contract)
    elif path.is_file() and path.suffix in (".jsonl", ".ndjson", ".json"):
        if _first_byte(path) == b"[" and _is_json(path):
            raise ValueError(f"{path} holds one JSON list, expected a row on each line; rename it to {path.stem}.json")
        with path.open("rb") as file:
            yield from rows_of_lines(file)
    else:
        try:
            dataset, is_csv = _open(path, split)
            yield from _rows_of_dataset(dataset, contract, is_csv=is_csv)
        except Exception as err:
            where = f" at split {split!r}" if path.is_dir() else ""
            raise ValueError(f"{path} cannot be read{where}: {type(err).__name__}: {err}") from err


def _open(path: Path, split: str) -> tuple[Any, bool]:
    """A file or folder, read by `datasets` without its cache, which identifies files by their names and times; see `_load`."""
    if path.is_file():
        return _load(str(path.absolute().parent), data_files=path.name, split="train", streaming=True)
    if not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _load(str(path.absolute()), split=split, streaming=True)
    import datasets

    saved = datasets.load_from_disk(str(path))
    if not isinstance(saved, Mapping):
        return saved, False
    if split not in saved:
        raise ValueError(f"there is no such split, only {', '.join(saved)}")
    return saved[split], False


def _load(path: str, *, split: str, streaming: bool = False, **files: str) -> tuple[Any, bool]:
    """Data as `datasets` loads it, and True for a CSV file, all cells of which are read as text."""
    import datasets
    from datasets.packaged_modules.csv.csv import Csv

    cells: dict[str, Any] = {}
    builder = datasets.load_dataset_builder(path, **files)
    if is_csv := isinstance(builder, Csv) and builder.config.features is None:
        import pandas

        # By itself pandas would read 022 as 22, and None and NA as missing.
        own = builder.config.data_files
        first = (own.get(split) or next(iter(own.values())))[0]
        options = {name: value for name, value in builder.config.pd_read_csv_kwargs.items() if name != "chunksize"}
        names = pandas.read_csv(first, **{**options, "nrows": 0}).columns
        texts = datasets.Features({str(name): datasets.Value("string") for name in names})
        cells = {"keep_default_na": False, "features": texts}
        builder = datasets.load_dataset_builder(path, **files, **cells)
    if streaming:
        return builder.as_streaming_dataset(split=split), is_csv
    return datasets.load_dataset(path, split=split, **files, **cells), is_csv


def _rows_of_dataset(dataset: Any, contract: Contract, *, is_csv: bool = False) -> Iterator[Row]:
    # Pictures and sounds would be decoded when they are read, and nothing here uses them.
    media = [
        name
        for name, kind in (dataset.features or {}).items()
        if getattr(kind, "decode", False) and type(kind).__name__ != "Json"
    ]
    dataset = dataset.with_format(None).remove_columns(media)
    if not is_csv:
        return rows_of_records(_read_batches(dataset), contract, lost_columns=media)
    texts = {PROMPT, VERIFIERS, contract.messages_key}
    for record in _read_batches(dataset):
        for name in record.keys() - texts:
            value = _of_cell(record[name])
            # A label True is a word.
            if isinstance(value, str) or (isinstance(value, bool) and name == contract.ground_truths_key):
                texts.add(name)
    records = (
        {name: cell or None if name in texts else _of_cell(cell) for name, cell in record.items()}
        for record in _read_batches(dataset)
    )
    return rows_of_records(records, contract, lost_columns=media)


def _read_batches(dataset: Any) -> Iterator[dict[str, Any]]:
    for batch in dataset.iter(batch_size=_BATCH_ROWS):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _of_cell(text: str | None) -> str | float | bool | None:
    """The number or truth value that is written exactly so, otherwise the text: 022, 1.50, nan; None for an empty cell."""
    if not text or text in ("True", "False"):
        return text == "True" if text else None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if str(value := kind(text)) == text and math.isfinite(value):
                return value
    return text


def _files(path: Path) -> list[Path]:
    """The file, or all files of the folder that are not hidden."""
    if path.is_file():
        return [path]
    found = (file for file in path.rglob("*") if file.is_file())
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _stamp(path: Path) -> Stamp:
    return [(str(file), status.st_mtime_ns, status.st_size) for file in _files(path) for status in [file.stat()]]


def _digest(path: Path) -> str:
    """A hash of all bytes, and of the names within a folder."""
    found = hashlib.sha256()
    for file in _files(path):
        if file != path:
            found.update(f"{file.relative_to(path)}\n{file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK):
                found.update(block)
    return found.hexdigest()


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def _first_byte(path: Path) -> bytes:
    """The first byte that is not white space."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
