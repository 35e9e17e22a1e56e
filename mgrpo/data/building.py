"""Prompts of the rows that a mix takes, written to a folder: each row is encoded once, however often it is taken."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.data.amounts import Entry
from mgrpo.data.checking import MOST_SHOWN
from mgrpo.data.encoding import Encoder, Recipe
from mgrpo.data.progress import progress_bar
from mgrpo.data.sources import Scale, Source
from mgrpo.data.statistics import statistics_of
from mgrpo.data.tables import Table, Writer, record_batch
from mgrpo.data.tokenizer import describe
from mgrpo.data.workers import do_all

_log = logging.getLogger(__name__)

_MOST_TASK_ROWS = 16_384
_LEAST_TASK_ROWS = 512
_TASKS_A_WORKER = 8


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

    def rows(self) -> list[np.ndarray]:
        """The rows that each line takes of its source."""
        return [line.rows(rows) for line, rows in zip(self.lines, self.num_rows, strict=True)]


class Cancelled(Exception):
    """The work was not done, as somebody wished."""


def build(
    folder: Path,
    selection: Selection,
    recipe: Recipe,
    tokenizer: Any,
    scale: Scale,
    *,
    cancelled: threading.Event,
) -> None:
    """Write the tables `prompts-*` (distinct rows), `order` (of the mix, prompts only) and statistics.json."""
    taken = selection.rows()
    distinct = [
        np.unique(np.concatenate([rows for rows, own in zip(taken, selection.numbers, strict=True) if own == number]))
        for number in range(len(selection.sources))
    ]
    starts = np.cumsum([0, *map(len, distinct)])
    places = [
        starts[number] + np.searchsorted(distinct[number], rows)
        for rows, number in zip(taken, selection.numbers, strict=True)
    ]
    _encode(folder, selection, distinct, recipe, tokenizer, scale, cancelled)

    lengths = Table.open(sorted(folder.glob("prompts-*.arrow"))).numbers("num_tokens")
    order = np.concatenate(places)
    if recipe.overlong != "truncate_left":
        order = order[lengths[order] <= recipe.max_tokens]
    if not len(order):
        raise ValueError(
            f"none of {sum(map(len, places))} prompts fits max_prompt_token_length={recipe.max_tokens}; "
            f"the shortest has {lengths.min()} tokens"
        )
    with Writer(folder / "order.arrow") as writer:
        writer.add(record_batch(numbers={"position": order}))
    statistics = statistics_of(
        selection.lines,
        selection.num_rows,
        [lengths[own] for own in places],
        max_tokens=recipe.max_tokens,
        overlong=recipe.overlong,
    )
    (folder / "statistics.json").write_text(json.dumps(statistics, indent=1) + "\n")


def _encode(
    folder: Path,
    selection: Selection,
    distinct: Sequence[np.ndarray],
    recipe: Recipe,
    tokenizer: Any,
    scale: Scale,
    cancelled: threading.Event,
) -> None:
    """Write the prompts of the distinct rows, source after source; raises if any cannot be made."""
    num_rows, num_bytes = sum(map(len, distinct)), sum(source.table.num_bytes for source in selection.sources)
    is_large = num_rows >= scale.pool_rows or num_bytes >= scale.pool_bytes
    num_workers, setup, written = 1, None, []
    if is_large and scale.num_workers > 1:
        num_workers, setup, written = _pool_setup(folder, selection, recipe, tokenizer, scale)
    tasks = list(_tasks(folder, distinct, num_workers))
    encoder = Encoder(recipe, tokenizer, [source.table for source in selection.sources])
    with progress_bar("tokenizing", num_rows) if is_large else nullcontext(lambda number: None) as bar:

        def advance(account: Mapping[str, Any]) -> None:
            if cancelled.is_set():
                raise Cancelled
            bar(account["num_rows"])

        accounts = do_all(
            tasks,
            here=encoder.encode_task,
            kind="encode",
            num_workers=min(num_workers, len(tasks)),
            setup=setup,
            advance=advance,
        )
    for path in written:
        path.unlink()
    _raise_problems(accounts, selection.sources, recipe, num_rows)


def _pool_setup(
    folder: Path, selection: Selection, recipe: Recipe, tokenizer: Any, scale: Scale
) -> tuple[int, dict[str, Any] | None, list[Path]]:
    """How many processes to use, what to tell them, and the tables that were written for them alone."""
    scratch = folder / "tokenizer"
    description = describe(tokenizer, scratch)
    if description is None:
        _log.warning("the tokenizer cannot be loaded in other processes; one process prepares all data")
        return 1, None, []
    files, written = [], []
    for number, source in enumerate(selection.sources):
        if not source.files:
            written.append(folder / f"source-{number:05}.arrow")
            with Writer(written[-1]) as writer:
                for batch in source.table.batches():
                    writer.add(batch)
        files.append([str(path) for path in source.files or written[-1:]])
    written += sorted(scratch.glob("*"))
    setup = {"prepare": {"recipe": recipe.to_json(), "tokenizer": description, "files": files}}
    return scale.num_workers, setup, written


def _tasks(folder: Path, distinct: Sequence[np.ndarray], num_workers: int) -> list[dict[str, Any]]:
    """Tasks of `Encoder.encode_task`, in the order of the table that they make together."""
    total = sum(map(len, distinct))
    size = max(_LEAST_TASK_ROWS, min(_MOST_TASK_ROWS, -(-total // (num_workers * _TASKS_A_WORKER))))
    tasks: list[dict[str, Any]] = []
    for source, rows in enumerate(distinct):
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            is_span = part[-1] - part[0] == len(part) - 1
            which = {"span": [int(part[0]), int(part[-1]) + 1]} if is_span else {"rows": part.tolist()}
            tasks.append({"source": source, "out": str(folder / f"prompts-{len(tasks):05}.arrow"), **which})
    return tasks


def _raise_problems(
    accounts: Sequence[Mapping[str, Any]], sources: Sequence[Source], recipe: Recipe, num_rows: int
) -> None:
    num_bad = sum(account["num_problems"] for account in accounts)
    if num_bad:
        bad = [problem for account in accounts for problem in account["problems"]][:MOST_SHOWN]
        shown = [f"{sources[source].origin(line)}: {problem}" for source, line, problem in bad]
        more = [f"... and {num_bad - len(shown)} more"] if num_bad > len(shown) else []
        raise ValueError(f"{num_bad} of {num_rows} rows cannot be made prompts:\n  " + "\n  ".join(shown + more))
    too_long = [row for account in accounts for row in account["too_long"]][:MOST_SHOWN]
    if too_long and recipe.overlong == "error":
        shown = [f"{sources[source].origin(line)}: {length} tokens" for source, line, length in too_long]
        raise ValueError(
            f"prompts are longer than max_prompt_token_length={recipe.max_tokens}, which overlong_prompt_policy=error "
            "forbids; the first:\n  " + "\n  ".join(shown)
        )
