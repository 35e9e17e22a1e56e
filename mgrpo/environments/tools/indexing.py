"""The command `mgrpo index`: builds the file that the tool `search` reads, from documents in JSON lines.

The index is SQLite's FTS5 with English stemming. The text is stored in it, so that the documents are not needed again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mgrpo.environments.tools.search import APPLICATION_ID, INDEX_VERSION, query_words

_TOKENIZER = "porter unicode61 remove_diacritics 2"
_FREQUENT_SHARE = 0.1
"""Words in more than this share of the documents are left out of queries: they rank little and cost most of the time."""
_FEW_DOCUMENTS = 10_000
"""No word of a smaller index is left out of queries: they are fast anyway."""
_SAMPLE = 2_000
_SHOWN = 80


def index_command(argv: Sequence[str]) -> int:
    """Build an index; returns the exit status."""
    options = _parser().parse_args(argv)
    out, began = Path(options.out), time.monotonic()
    try:
        num_documents = build(
            map(Path, options.documents), out, title_field=options.title_field, text_field=options.text_field
        )
    except (OSError, ValueError, sqlite3.Error) as err:
        sys.stderr.write(f"mgrpo index: {err}\n")
        return 2
    size, seconds = out.stat().st_size / 2**20, time.monotonic() - began
    sys.stdout.write(f"{out}: {num_documents} documents, {size:.1f} MiB, {seconds:.1f} s\n")
    return 0


def build(files: Iterable[Path], out: Path, *, title_field: str = "title", text_field: str = "text") -> int:
    """Write the index and return the number of documents. A file appears at `out` only when it is complete."""
    if out.exists():
        raise ValueError(f"--out {out} exists already; remove it, or choose another name")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: the folder {out.parent} does not exist")
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        connection = sqlite3.connect(partial)
        try:
            num_documents = _fill(connection, _documents(files, title_field=title_field, text_field=text_field))
        finally:
            connection.close()
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return num_documents


def _fill(connection: sqlite3.Connection, documents: Iterable[tuple[str, str]]) -> int:
    # A file that is not complete is thrown away, so nothing has to survive a crash.
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {INDEX_VERSION}")
    with connection:
        connection.execute(f"CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = '{_TOKENIZER}')")
        connection.execute("CREATE TABLE frequent (word TEXT PRIMARY KEY)")
        connection.executemany("INSERT INTO documents VALUES (?, ?)", documents)
        num_documents = connection.execute("SELECT count(*) FROM documents").fetchone()[0]
        if not num_documents:
            raise ValueError("the files hold no document")
        frequent = _frequent_words(connection, num_documents)
        connection.executemany("INSERT INTO frequent VALUES (?)", ((word,) for word in frequent))
        connection.execute("INSERT INTO documents(documents) VALUES ('optimize')")
    return num_documents


def _frequent_words(connection: sqlite3.Connection, num_documents: int) -> list[str]:
    """Words in more than a tenth of the documents, by a sample at equal distances."""
    if num_documents <= _FEW_DOCUMENTS:
        return []
    sampled = range(1, num_documents + 1, num_documents // _SAMPLE)
    found: Counter[str] = Counter()
    for row in sampled:
        (text,) = connection.execute("SELECT text FROM documents WHERE rowid = ?", (row,)).fetchone()
        found.update(query_words(text, limit=None))
    return sorted(word for word, number in found.items() if number > _FREQUENT_SHARE * len(sampled))


def _documents(files: Iterable[Path], *, title_field: str, text_field: str) -> Iterator[tuple[str, str]]:
    for path in files:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _document(line, f"{path}:{number}", title_field=title_field, text_field=text_field)


def _document(line: bytes, where: str, *, title_field: str, text_field: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise ValueError(f"{where}: not JSON ({err}); expected one object a line") from err
    if not isinstance(record, dict):
        raise ValueError(f"{where}: found {repr(record)[:_SHOWN]}, expected an object with {text_field}")
    text, title = record.get(text_field), record.get(title_field)
    if not isinstance(text, str) or not text.strip():
        keys = ", ".join(map(str, record)) or "nothing"
        raise ValueError(
            f"{where}: found {text_field} {repr(text)[:_SHOWN]} among {keys}, expected text; "
            "choose its column with --text_field"
        )
    if title is not None and not isinstance(title, str):
        raise ValueError(
            f"{where}: found {title_field} {repr(title)[:_SHOWN]}, expected text; choose with --title_field"
        )
    return _storable(title or ""), _storable(text)


def _storable(text: str) -> str:
    """The text without lone surrogates, which JSON may hold and SQLite cannot store."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mgrpo index", description="Builds an index for the tool search.")
    parser.add_argument("documents", nargs="+", help="files of JSON lines, also .gz; one document a line")
    parser.add_argument("--out", required=True, help="the index, a new file")
    parser.add_argument("--title_field", default="title", help="column of the title; a document may lack it")
    parser.add_argument("--text_field", default="text", help="column of the text")
    return parser
