"""Prompts of the rows that a mix takes, written to a folder: each row is encoded once, however often it is taken."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np

from mgrpo.data.amounts import Entry
from mgrpo.data.checking import MOST_SHOWN, Row
from mgrpo.data.encoding import ROWS, Cancelled, Encoder, Recipe, encode_rows, row_writer
from mgrpo.data.program import encode_in_program
from mgrpo.data.prompt_set import ORDER, STATISTICS, num_tokens, open_prompts
from mgrpo.data.sources import Scale, Source
from mgrpo.data.statistics import statistics_of
from mgrpo.data.tokenizer import describe

if TYPE_CHECKING:
    import pyarrow

_log = logging.getLogger(__name__)

_BATCH_ROWS = 1000
_BATCH_CHARS = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows a mix takes, in its order."""

    lines: tuple[Entry, ...]
    sources: tuple[Source, ...]
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
        """For each source the distinct rows that are taken of it; for each line the places of its rows among all these."""
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
    scale: Scale,
    *,
    fingerprint: str,
    cancelled: Event,
) -> None:
    """Write the files of a `PromptSet`: prompts of the distinct rows, their order in the mix, statistics."""
    distinct, places = selection.places()
    num_bytes = _write_rows(folder / ROWS, selection.sources, distinct, cancelled)
    num_rows = sum(map(len, distinct))
    is_large = num_rows >= scale.pool_rows or num_bytes >= scale.pool_bytes
    num_proc = min(scale.num_proc or _cores(), num_rows) if is_large else 1
    description = describe(tokenizer, folder / "tokenizer") if num_proc > 1 else None
    if description is not None:
        print(f"tokenizing {num_rows:,} rows with {num_proc} processes", file=sys.stderr, flush=True)
        encode_in_program(folder, recipe, description, fingerprint=fingerprint, num_proc=num_proc, cancelled=cancelled)
    else:
        if num_proc > 1:
            _log.warning("the tokenizer cannot be loaded in another process; this one prepares all data")
        encoder = Encoder(recipe=recipe, tokenizer=tokenizer, cancelled=cancelled)
        with _no_progress_bars():
            encode_rows(folder, encoder, fingerprint=fingerprint)
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    (folder / ROWS).unlink()

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
    )
    (folder / STATISTICS).write_text(json.dumps(statistics, indent=1) + "\n")


def _write_rows(path: Path, sources: Sequence[Source], distinct: Sequence[np.ndarray], cancelled: Event) -> int:
    """Write the distinct rows, source after source; returns how many characters they have."""
    num_chars = 0
    with row_writer(path) as writer:
        for number, (source, wanted) in enumerate(zip(sources, distinct, strict=True)):
            for batch in _batches(source.taken(wanted)):
                if cancelled.is_set():
                    raise Cancelled
                lines, texts = [row.line for row in batch], [row.text for row in batch]
                writer.write_batch({"source": [number] * len(batch), "line": lines, "record": texts})
                num_chars += sum(map(len, texts))
    return num_chars


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    num_chars = 0
    for row in rows:
        batch.append(row)
        num_chars += len(row.text)
        if len(batch) == _BATCH_ROWS or num_chars > _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _raise_problems(prompts: pyarrow.Table, sources: Sequence[Source], recipe: Recipe) -> None:
    def origin(place: int) -> str:
        source, line = (prompts.column(name)[place].as_py() for name in ("source", "line"))
        return sources[source].origin(line)

    problems = prompts.column("problem")
    bad = [place for place, problem in enumerate(problems.to_pylist()) if problem]
    if bad:
        shown = [f"{origin(place)}: {problems[place]}" for place in bad[:MOST_SHOWN]]
        more = [f"... and {len(bad) - len(shown)} more"] if len(bad) > len(shown) else []
        raise ValueError(f"{len(bad)} of {len(prompts)} rows cannot be made prompts:\n  " + "\n  ".join(shown + more))
    lengths = num_tokens(prompts)
    too_long = np.flatnonzero(lengths > recipe.max_tokens)[:MOST_SHOWN].tolist()
    if too_long and recipe.overlong == "error":
        shown = [f"{origin(place)}: {lengths[place]} tokens" for place in too_long]
        raise ValueError(
            f"prompts are longer than max_prompt_token_length={recipe.max_tokens}, which overlong_prompt_policy=error "
            "forbids; the first:\n  " + "\n  ".join(shown)
        )


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
