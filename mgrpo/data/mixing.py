"""Rows of a data mix: where they come from, how many are taken, and whether each is well formed.

Runs before a tokenizer or a model exists, so that bad data ends a run in its first second. Nothing is cached: an edited
file is an edited data set.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

_log = logging.getLogger(__name__)

# Open Instruct's seed for choosing a part of a data set: the same amounts give the same rows there and here.
_SUBSET_SEED = 42
_SHOWN_PROBLEMS = 10
_COLUMNS = ("messages", "prompt", "ground_truth", "dataset")

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checked row, not yet templated: exactly one of `messages` and `prompt` is set."""

    messages: tuple[Message, ...] | None
    """{"role", "content"} each; for the chat template."""
    prompt: str | None
    """Plain text, used as it is."""
    verifiers: tuple[str, ...]
    ground_truths: tuple[object, ...]
    """One JSON value a verifier."""
    origin: str
    """"file:line", for messages."""


def read_rows(mixer_list: Sequence[str], splits: Sequence[str], *, need_verifiers: bool = True) -> list[Row]:
    """Read and mix data sets: `mixer_list` is source, amount, source, amount, ...

    A source is a .jsonl or .parquet file (any split will do), a folder written by `datasets` or a data set's name. An
    amount with a point is a share of the rows, else their number: all rows in order come first as often as they fit,
    then a random rest, always the same one.

    Args:
        splits: one for all sources, or one each.
        need_verifiers: False for runs that verify nothing: `dataset` is not looked at, `ground_truth` is kept as it is.
    """
    pairs = _pairs(mixer_list, splits)
    rows: list[Row] = []
    for source, amount, split in pairs:
        whole = parse_rows(_records(source, split), source=source, need_verifiers=need_verifiers)
        rows.extend(whole[index] for index in _selection(source, amount, len(whole)))
    if pairs and not rows:
        raise ValueError(f"the data mix {' '.join(map(str, mixer_list))} selects no rows; ask for more")
    return rows


def parse_rows(records: Iterable[object], *, source: str, need_verifiers: bool = True) -> list[Row]:
    """Check records against the row contract; all bad ones are reported in one ValueError.

    A record has `messages` (a list of {"role", "content"}) or else `prompt` (a string, or such a list), `dataset` (the
    name of a verifier, or a list of names) and `ground_truth` (any JSON value; with a list of names, one each).
    """
    rows, problems = [], []
    for number, record in enumerate(records, start=1):
        origin = f"{source}:{number}"
        try:
            if isinstance(record, _Unreadable):
                raise ValueError(record.why)
            if record is not _BLANK:
                rows.append(_row(record, origin, need_verifiers))
        except ValueError as err:
            problems.append(f"{origin}: {err}")
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        shown = problems[:_SHOWN_PROBLEMS] + ([f"... and {more} more"] if more > 0 else [])
        count = "1 malformed row" if len(problems) == 1 else f"{len(problems)} malformed rows"
        raise ValueError(f"{count} in {source}:\n  " + "\n  ".join(shown))
    if not rows:
        raise ValueError(f"{source} has no rows")
    return rows


def _pairs(mixer_list: Sequence[str], splits: Sequence[str]) -> list[tuple[str, str, str]]:
    if len(mixer_list) % 2:
        raise ValueError(
            f"the data mix has {len(mixer_list)} entries ({' '.join(map(str, mixer_list))}); "
            "expected pairs of source and amount, for example data.jsonl 1.0"
        )
    sources, amounts = mixer_list[::2], [str(amount) for amount in mixer_list[1::2]]
    if len(splits) not in (1, len(sources)):
        raise ValueError(f"{len(splits)} splits for {len(sources)} data sets; give one for all or one each")
    all_splits = splits if len(splits) == len(sources) else [splits[0]] * len(sources)
    for source, amount in zip(sources, amounts, strict=True):
        _parse_amount(source, amount)
    return list(zip(sources, amounts, all_splits, strict=True))


def _parse_amount(source: str, amount: str) -> Decimal | int:
    """A share (Decimal, exactly as written) or a count (int)."""
    try:
        parsed = Decimal(amount) if "." in amount else int(amount)
    except (InvalidOperation, ValueError):
        parsed = -1
    if not 0 <= parsed < Decimal("Infinity"):
        raise ValueError(
            f"amount {amount!r} of {source} is neither a share (with a point, 1.0 is all rows) nor a count of rows"
        )
    return parsed


def _selection(source: str, amount: str, num_rows: int) -> list[int]:
    """Indices of the rows to take: whole passes in order, then a random remainder without repeats."""
    parsed = _parse_amount(source, amount)
    wanted = parsed if isinstance(parsed, int) else int(parsed * num_rows)
    if isinstance(parsed, int) and wanted <= 10 and num_rows > 100:
        _log.warning(
            "amount %s takes %d of the %d rows of %s; a share needs a point: %s.0",
            amount,
            wanted,
            num_rows,
            source,
            amount,
        )
    passes, remainder = divmod(wanted, num_rows)
    indices = list(range(num_rows)) * passes
    if remainder:
        chosen = np.random.RandomState(_SUBSET_SEED).choice(num_rows, size=remainder, replace=False)
        indices.extend(chosen.tolist())
    return indices


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a line that is no JSON, so that it is reported with the other bad rows."""

    why: str


_BLANK = object()
"""Stands for an empty line, so that the lines after it keep their numbers."""


def _records(source: str, split: str) -> Iterable[object]:
    path = Path(source)
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise ValueError(f"data file {source} does not exist (looked for {path.absolute()})")
        return _jsonl_records(path) if path.suffix == ".jsonl" else _parquet_records(path)
    if path.is_file():
        raise ValueError(f"data file {source} is of no known kind; expected .jsonl or .parquet")
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved_records(path, split)
    return _named_records(source, split)


def _jsonl_records(path: Path) -> Iterable[object]:
    with path.open("rb") as lines:
        for line in lines:
            if not line.strip():
                yield _BLANK
                continue
            try:
                yield json.loads(line.decode("utf-8-sig"))
            except ValueError as err:
                found = line.strip()[:60].decode(errors="replace")
                yield _Unreadable(f"found {found!r}, expected one JSON object on the line ({err})")


def _parquet_records(path: Path) -> list[dict]:
    _require("pyarrow", for_source=str(path))
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as err:
        raise ValueError(f"{path} cannot be read as parquet: {err}") from err
    with file:
        columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
        return file.read(columns=columns or None).to_pylist()


def _saved_records(path: Path, split: str) -> Iterable[dict]:
    _require("datasets", for_source=str(path))
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ValueError(f"{path} has no split {split!r}; it has {', '.join(saved)}")
        saved = saved[split]
    return _plain(saved)


def _named_records(source: str, split: str) -> Iterable[dict]:
    _require("datasets", for_source=source)
    import datasets

    try:
        return _plain(datasets.load_dataset(source, split=split))
    except Exception as err:
        raise ValueError(
            f"{source} is no file or folder here, and as the name of a data set (split {split!r}) "
            f"it could not be loaded: {type(err).__name__}: {err}"
        ) from err


def _require(module: str, *, for_source: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{for_source} needs the package {module}: pip install 'mgrpo[data]', or use a .jsonl file")


def _plain(dataset: Any) -> Iterable[dict]:
    columns = [name for name in _COLUMNS if name in dataset.column_names]
    return dataset.select_columns(columns) if columns else dataset


def _row(record: object, origin: str, need_verifiers: bool) -> Row:
    if not isinstance(record, dict):
        raise ValueError(
            f"found {_shown(record)}, expected an object with messages or prompt, ground_truth and dataset"
        )
    messages, prompt = record.get("messages"), record.get("prompt")
    if messages is None and isinstance(prompt, list):
        messages, prompt = prompt, None
    if messages is not None:
        messages, prompt = _messages(messages), None
    elif not isinstance(prompt, str) or not prompt:
        keys = ", ".join(map(repr, record)) or "nothing"
        raise ValueError(
            f"found prompt {_shown(prompt)} among {keys}, expected messages (a list of role and content) or prompt (text)"
        )
    verifiers, ground_truths = _labels(record, need_verifiers)
    return Row(messages=messages, prompt=prompt, verifiers=verifiers, ground_truths=ground_truths, origin=origin)


def _messages(messages: object) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"found messages {_shown(messages)}, expected a list with at least one message")
    for message in messages:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise ValueError(f'found message {_shown(message)}, expected {{"role": text, "content": text}}')
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _labels(record: dict, need_verifiers: bool) -> tuple[tuple[str, ...], tuple[object, ...]]:
    names, truth = record.get("dataset"), record.get("ground_truth")
    if not need_verifiers:
        return (), () if truth is None else (truth,)
    if isinstance(names, str) and names:
        verifiers = (names,)
    elif isinstance(names, list) and names and all(isinstance(name, str) and name for name in names):
        verifiers = tuple(names)
    else:
        raise ValueError(f"found dataset {_shown(names)}, expected the name of a verifier, or a list of names")
    if truth is None:
        raise ValueError("found no ground_truth, expected what the verifier compares with")
    try:
        json.dumps(truth)
    except (TypeError, ValueError) as err:
        raise ValueError(f"found ground_truth {_shown(truth)}, expected a JSON value ({err})") from err
    if isinstance(names, str) or (len(verifiers) == 1 and not isinstance(truth, list)):
        return verifiers, (truth,)
    if not isinstance(truth, list) or len(truth) != len(verifiers):
        raise ValueError(
            f"found ground_truth {_shown(truth)} for {len(verifiers)} verifiers, expected a list with one value each"
        )
    return verifiers, tuple(truth)


def _shown(value: object) -> str:
    return repr(value)[:80]
