"""The tool `search`: passages from a local index (`mgrpo index`), ranked by BM25, or from a service over HTTP.

A query is taken as words. A model's text never becomes syntax of the index.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mgrpo.environments.environment import Call, Environment, Observation, Tool
from mgrpo.processes.reply_bodies import KEEP_ALIVE_S, PLAIN, plain_body

APPLICATION_ID = 0x6D677270
"""Id of SQLite files of `mgrpo index`."""
INDEX_VERSION = 1
_WORD = re.compile(r"\w+")
_MAX_QUERY_WORDS = 32
_TITLE_WEIGHT = 4.0
_TRIES = 3
_TEMPORARY_STATUSES = (502, 503, 504)
_PAUSE_S = 0.2
_MOST_BYTES = 16 * 2**20

_SEARCH = Tool(
    name="search",
    description="Searches a collection of documents and returns the passages that fit the query best.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Words to search for."}},
        "required": ["query"],
    },
)


class SearchError(Exception):
    """A search that failed; the message is for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One result."""

    title: str
    text: str


class SearchSource(Protocol):
    """An index or a service that is searched."""

    async def ask(self, query: str, num_results: int) -> list[Passage]:
        """The best passages first; raises SearchError."""
        ...

    async def close(self) -> None: ...


class Search(Environment):
    """Settings: either `index` or `endpoint`, and the size of a result."""

    name = "search"

    def __init__(
        self,
        *,
        index: str = "",
        endpoint: str = "",
        num_results: int = 3,
        max_words: int = 150,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            index: a file that `mgrpo index` has built.
            endpoint: a URL that answers POST {"query", "n_docs"} with {"results"}.
            max_words: most words of one passage; a longer one is cut to the part with most of the query's words.
            parameters: further fields of each request to the endpoint.
        """
        if bool(index) == bool(endpoint):
            raise ValueError(f"search: got index={index!r} and endpoint={endpoint!r}, expected exactly one of them")
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"search: endpoint={endpoint!r}, expected an address, for example http://localhost:8000/search"
            )
        for field, value in (("num_results", num_results), ("max_words", max_words)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"search: {field}={value!r}, expected a whole number of at least 1")
        if parameters and not endpoint:
            raise ValueError("search: parameters are fields of requests to an endpoint; an index has none")
        self.is_repeatable = bool(index)
        self._index, self._endpoint, self._parameters = index, endpoint, dict(parameters or {})
        self._num_results, self._max_words = num_results, max_words
        self._source: SearchSource | None = None

    async def setup(self) -> None:
        self._source = LocalIndex(self._index) if self._index else SearchService(self._endpoint, self._parameters)

    def tools(self) -> Sequence[Tool]:
        return (_SEARCH,)

    async def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        return [await self._answered(str(call.arguments.get("query", ""))) for call in calls]

    async def close(self) -> None:
        if self._source is not None:
            await self._source.close()
            self._source = None

    async def _answered(self, query: str) -> Observation:
        assert self._source is not None, "setup comes first"
        words = query_words(query)
        if not words:
            return Observation(text="The query has no words; write what to search for.", failed=True)
        try:
            found = (await self._source.ask(query, self._num_results))[: self._num_results]
        except SearchError as err:
            return Observation(text=str(err), failed=True)
        if not found:
            return Observation(text="Nothing was found; try other words.")
        shown = (
            "\n".join(
                filter(None, (f"[{number}] {passage.title}".rstrip(), excerpt(passage.text, words, self._max_words)))
            )
            for number, passage in enumerate(found, 1)
        )
        return Observation(text="\n\n".join(shown))


class LocalIndex:
    """Queries of one index. It is only read, so that any number of processes may open it."""

    def __init__(self, path: str) -> None:
        self._connection = _opened(Path(path))
        self._frequent = {word for (word,) in self._connection.execute("SELECT word FROM frequent")}

    async def ask(self, query: str, num_results: int) -> list[Passage]:
        try:
            return await asyncio.to_thread(self.found, query, num_results)
        except asyncio.CancelledError:
            self._connection.interrupt()
            raise

    def found(self, query: str, num_results: int) -> list[Passage]:
        """Documents with any of the words; words that are everywhere only count if the query has no others."""
        words = query_words(query)
        wanted = [word for word in words if word not in self._frequent] or words
        match = " OR ".join(f'"{word}"' for word in wanted)
        rows = self._connection.execute(
            "SELECT title, text FROM documents WHERE documents MATCH ? "
            f"ORDER BY bm25(documents, {_TITLE_WEIGHT}, 1.0), rowid LIMIT ?",
            (match, num_results),
        )
        return [Passage(title=title, text=text) for title, text in rows]

    async def close(self) -> None:
        self._connection.close()


class SearchService:
    """A search service over HTTP. Results are texts, objects with a text, or massive-serve's {"passages"}."""

    def __init__(self, endpoint: str, parameters: Mapping[str, Any]) -> None:
        """Create the client, within a running loop."""
        import aiohttp

        self._endpoint, self._parameters = endpoint, parameters
        connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, headers=PLAIN, auto_decompress=False)

    async def ask(self, query: str, num_results: int) -> list[Passage]:
        import aiohttp

        request = {"query": query, "n_docs": num_results, **self._parameters}
        for attempt in range(1, _TRIES + 1):
            try:
                async with self._session.post(self._endpoint, json=request, allow_redirects=False) as response:
                    if response.status == 200:
                        return _passages(await plain_body(response.headers, response.content.iter_any(), _MOST_BYTES))
                    problem = f"it answered with status {response.status}"
                    if response.status not in _TEMPORARY_STATUSES:
                        break
            except (aiohttp.ClientError, TimeoutError) as err:
                problem = f"{type(err).__name__}: {err}"
            except ValueError as err:
                problem = str(err)
                break
            if attempt < _TRIES:
                await asyncio.sleep(_PAUSE_S * attempt)
        raise SearchError(f"The search service is not available ({problem}).")

    async def close(self) -> None:
        await self._session.close()


def query_words(query: str, *, limit: int | None = _MAX_QUERY_WORDS) -> list[str]:
    """The words of a query, each once."""
    return list(dict.fromkeys(_WORD.findall(query.lower())))[:limit]


def excerpt(text: str, wanted: Collection[str], max_words: int) -> str:
    """The `max_words` words in a row that hold most of the wanted ones, the first such part."""
    words = text.split()
    if len(words) <= max_words:
        return text.strip()
    hits = (not set(_WORD.findall(word.lower())).isdisjoint(wanted) for word in words)
    before = list(itertools.accumulate(hits, initial=0))
    starts = range(len(words) - max_words + 1)
    start = max(starts, key=lambda first: before[first + max_words] - before[first])
    end = start + max_words
    return ("... " if start else "") + " ".join(words[start:end]) + (" ..." if end < len(words) else "")


def _opened(path: Path) -> sqlite3.Connection:
    build = f"build it with: mgrpo index DOCUMENTS.jsonl --out {path}"
    if not path.is_file():
        raise ValueError(f"search: index={str(path)!r} does not exist; {build}")
    # Immutable: no locks, which network folders often lack. Threads: one call at a time, from any thread.
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False)
    try:
        kind = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError:
        kind, version = 0, 0
    if kind == APPLICATION_ID and version == INDEX_VERSION:
        return connection
    connection.close()
    found = f"is an index of version {version}" if kind == APPLICATION_ID else "is no index of `mgrpo index`"
    raise ValueError(f"search: index={str(path)!r} {found}, expected one of version {INDEX_VERSION}; {build}")


def _passages(body: bytes) -> list[Passage]:
    """The results in an answer; SearchError where it cannot be read."""
    try:
        results = json.loads(body)["results"]
    except (ValueError, TypeError, KeyError, RecursionError) as err:
        raise SearchError('The search service gave no {"results": ...}.') from err
    if isinstance(results, Mapping):
        results = results.get("passages", [])
    if isinstance(results, list) and len(results) == 1 and isinstance(results[0], list):
        results = results[0]  # one query of a batch
    if not isinstance(results, list):
        raise SearchError("The search service gave results that are no list.")
    return [_passage(result) for result in results]


def _passage(result: object) -> Passage:
    if not isinstance(result, Mapping):
        return Passage(title="", text=str(result))
    text = next((result[key] for key in ("text", "snippet", "content", "passage", "contents") if result.get(key)), "")
    return Passage(title=str(result.get("title") or ""), text=str(text))
