"""Prompts of the rows that a mix takes, written to a folder: each row is encoded once, however often it is taken.

`Dataset.map` does it in this process, and a fast tokenizer uses threads. There are no forked processes, because a
script of the user's may have started threads, and no spawned ones, because they would import the user's script again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mgrpo.data.amounts import Entry
from mgrpo.data.checking import MOST_SHOWN, Mistake, Row
from mgrpo.data.encoding import REMARKS, Encoder, MessageCheck, Recipe
from mgrpo.data.prompt_set import ORDER, PROMPTS, STATISTICS, largest_token, num_tokens, open_prompts
from mgrpo.data.sources import DataSource
from mgrpo.data.statistics import statistics_of

if TYPE_CHECKING:
    import pyarrow

_BATCH_ROWS = 1000
_BATCH_CHARS = 4 * 2**20
_ANNOUNCED_ROWS = 50_000
_THINK_END = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rows of a mix, in its order."""

    lines: tuple[Entry, ...]
    sources: tuple[DataSource, ...]
    """Each once."""
    numbers: tuple[int, ...]
    """The source of each line."""

    @property
    def num_rows(self) -> list[int]:
        """Rows of each line's source."""
        return [self.sources[number].summary.num_rows for number in self.numbers]

    @property
    def num_taken(self) -> list[int]:
        """Rows that each line takes."""
        return [line.num_taken(rows) for line, rows in zip(self.lines, self.num_rows, strict=True)]

    def places(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The distinct rows taken from each source; for each line, the places of its rows among all of these."""
        taken = [line.rows(rows) for line, rows in zip(self.lines, self.num_rows, strict=True)]
        distinct = [
            np.unique(np.concatenate([rows for rows, own in zip(taken, self.numbers, strict=True) if own == number]))
            for number in range(len(self.sources))
        ]
        starts = np.cumsum([0, *map(len, distinct)])
        places = [
            starts[number] + np.searchsorted(distinct[number], rows)
            for rows, number in zip(taken, self.numbers, strict=True)
        ]
        return distinct, places


def build(
    folder: Path,
    selection: Selection,
    recipe: Recipe,
    tokenizer: Any,
    *,
    fingerprint: str,
) -> None:
    """Write the files of a `PromptSet`: prompts of the distinct rows, their order in the mix, statistics.

    Args:
        fingerprint: identity of the prompts for `datasets`; its own would hash the tokenizer.
    """
    distinct, places = selection.places()
    if (num_rows := sum(map(len, distinct))) >= _ANNOUNCED_ROWS:
        print(f"tokenizing {num_rows:,} rows", file=sys.stderr, flush=True)
    num_threads = _cores()
    with _no_progress_bars(), ThreadPoolExecutor(num_threads) as threads:
        check = MessageCheck(recipe, tokenizer)
        encoder = Encoder(recipe=recipe, tokenizer=tokenizer, check=check, threads=threads, num_threads=num_threads)
        _encode(folder, _batches(selection.sources, distinct), encoder, fingerprint)

    prompts = open_prompts(folder)
    _raise_problems(prompts, selection.sources, recipe)
    lengths = num_tokens(prompts)
    order = np.concatenate(places)
    if recipe.overlong != "truncate_left":
        order = order[lengths[order] <= recipe.max_tokens]
    if not len(order):
        raise ValueError(
            f"none of {sum(map(len, places))} prompts fits max_prompt_token_length={recipe.max_tokens}; "
            f"the shortest has {lengths.min()} tokens"
        )
    np.save(folder / ORDER, order)
    statistics = statistics_of(
        selection.lines,
        selection.num_rows,
        [lengths[own] for own in places],
        max_tokens=recipe.max_tokens,
        overlong=recipe.overlong,
    ) | {
        "largest_token": largest_token(prompts),
        **{name: _remarked(prompts, name) for name in REMARKS},
        "same_text": _same_texts(prompts, recipe),
    }
    (folder / STATISTICS).write_text(json.dumps(statistics, indent=1) + "\n")


def _encode(folder: Path, batches: Iterator[tuple[int, list[Row]]], encoder: Encoder, fingerprint: str) -> None:
    """Write `PROMPTS`: for each row its source's number, its line and JSON, and the encoder's columns."""
    from datasets import Dataset, Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    features = Features(source=Value("int32"), line=Value("int64"), record=Value("large_string"))
    path = folder / "rows.arrow"
    with ArrowWriter(path=str(path), features=features) as writer:
        for source, rows in batches:
            lines, texts = [row.line for row in rows], [row.text for row in rows]
            writer.write_batch({"source": [source] * len(rows), "line": lines, "record": texts})
        writer.finalize()
    rows = Dataset.from_file(str(path))
    # Of very long rows fewer at once: a batch is in memory several times.
    batch_rows = max(1, min(_BATCH_ROWS, len(rows) * _BATCH_CHARS // (rows.data.nbytes + 1)))
    rows.map(
        encoder,
        input_columns=["record"],
        batched=True,
        batch_size=batch_rows,
        writer_batch_size=batch_rows,
        features=Features(
            **features,
            text=Value("large_string"),
            tokens=List(Value("int32")),
            num_tokens=Value("int64"),
            problem=Value("large_string"),
            **{name: Value("large_string") for name in REMARKS},
        ),
        cache_file_name=str(folder / PROMPTS),
        new_fingerprint=fingerprint,
    )
    path.unlink()


def _batches(sources: Sequence[DataSource], distinct: Sequence[np.ndarray]) -> Iterator[tuple[int, list[Row]]]:
    """The distinct rows, source after source, as many as are written at once."""
    for number, (source, wanted) in enumerate(zip(sources, distinct, strict=True)):
        batch: list[Row] = []
        num_chars = 0
        for row in source.taken(wanted):
            batch.append(row)
            num_chars += len(row.text)
            if len(batch) == _BATCH_ROWS or num_chars > _BATCH_CHARS:
                yield number, batch
                batch, num_chars = [], 0
        yield number, batch


def _raise_problems(prompts: pyarrow.Table, sources: Sequence[DataSource], recipe: Recipe) -> None:
    places = list(zip(*(prompts.column(name).to_pylist() for name in ("source", "line")), strict=True))
    mistakes: dict[tuple[int, str], Mistake] = {}
    for (source, line), problem in zip(places, prompts.column("problem").to_pylist(), strict=True):
        if problem:
            mistakes.setdefault((source, problem), Mistake(problem)).add(line)
    if mistakes:
        found = list(mistakes.items())
        shown = [
            f"{sources[source].origin(mistake.lines[0])}: {mistake}" for (source, _), mistake in found[:MOST_SHOWN]
        ]
        num_bad, unnamed = (sum(mistake.num_rows for _, mistake in rows) for rows in (found, found[MOST_SHOWN:]))
        more = [f"... and {unnamed:,} more"] if unnamed else []
        raise ValueError(f"{num_bad} of {len(prompts)} rows cannot be made prompts:\n  " + "\n  ".join(shown + more))
    lengths = num_tokens(prompts)
    too_long = np.flatnonzero(lengths > recipe.max_tokens)[:MOST_SHOWN].tolist()
    if too_long and recipe.overlong == "error":
        shown = [
            f"{sources[source].origin(line)}: {lengths[place]} tokens"
            for place in too_long
            for source, line in [places[place]]
        ]
        raise ValueError(
            f"prompts are longer than max_prompt_token_length={recipe.max_tokens}, which overlong_prompt_policy=error "
            "forbids; the first:\n  " + "\n  ".join(shown)
        )


def _remarked(prompts: pyarrow.Table, column: str) -> list[dict[str, Any]]:
    """Number of rows and line of the first, for each source and sequence of roles in a column of `REMARKS`."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for batch in prompts.select(["source", "line", column]).to_batches():
        for source, line, roles in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if roles:
                first = {"source": source, "line": line, "what": roles, "rows": 0}
                found.setdefault((source, roles), first)["rows"] += 1
    return list(found.values())


def _same_texts(prompts: pyarrow.Table, recipe: Recipe) -> dict[str, Any] | None:
    """The rows whose messages differ from those of an earlier row with the same prompt: their number, and the first pair."""
    hashes = np.concatenate(
        [np.array([hash(text) for text in chunk.to_pylist()], np.int64) for chunk in prompts.column("text").chunks]
    )
    _, groups, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero((counts[groups] > 1) & (num_tokens(prompts) <= recipe.max_tokens))
    firsts: dict[int, tuple[int, object]] = {}
    pairs = []
    for place in repeated.tolist():
        asked = recipe.asked(json.loads(prompts.column("record")[place].as_py()))
        if isinstance(asked, str):
            continue
        # Templates strip spaces, and the thinking of earlier turns.
        own = [(message["role"], message["content"].rpartition(_THINK_END)[2].strip()) for message in asked]
        first, other = firsts.setdefault(groups[place], (place, own))
        if own != other:
            pairs.append((first, place))
    if not pairs:
        return None
    origins = [[prompts.column(name)[place].as_py() for name in ("source", "line")] for place in pairs[0]]
    return {"rows": len(pairs), "first": origins}


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets

    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
