"""The tool search: a local index, and a service over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mgrpo.environments.environment import Call
from mgrpo.environments.tools.indexing import build, index_command
from mgrpo.environments.tools.search import LocalIndex, Search, excerpt

DOCUMENTS = [
    {"title": "Paris", "text": "The capital of France. The Eiffel tower stands there."},
    {"title": "Rome", "text": "The capital of Italy, with an old arena."},
    {"title": "Towers", "text": "Buildings that are much higher than they are wide."},
    {"text": "A document without a title, about wombats."},
]


def written(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


@pytest.fixture
def index(tmp_path):
    out = tmp_path / "index.db"
    build([written(tmp_path / "documents.jsonl", DOCUMENTS)], out)
    return out


def asked(queries, **settings):
    """Observations of one turn with a call for each query."""

    async def run():
        search = Search(**settings)
        await search.setup()
        try:
            return await search.step([Call(name="search", arguments={"query": query}) for query in queries])
        finally:
            await search.close()

    return asyncio.run(run())


@pytest.fixture
def service():
    """A search service: `answers` are (status, body), the last one for ever; `requests` is what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.answers = [], []
    server.url = f"http://127.0.0.1:{server.server_address[1]}/search"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_document_with_most_of_the_words_comes_first(index):
    (observation,) = asked(["capital of Italy"], index=str(index))
    assert observation.text == (
        "[1] Rome\nThe capital of Italy, with an old arena.\n\n"
        "[2] Paris\nThe capital of France. The Eiffel tower stands there."
    )
    assert not observation.failed


def test_words_are_found_in_other_forms_and_a_title_weighs_more_than_text(index):
    """Without stemming a model must guess whether a document says tower or towers."""
    (observation,) = asked(["TOWER"], index=str(index), num_results=1)
    assert observation.text.startswith("[1] Towers\n")


def test_a_document_without_a_title_has_only_its_number(index):
    assert asked(["wombat"], index=str(index))[0].text == "[1]\nA document without a title, about wombats."


@pytest.mark.parametrize(
    "query",
    [
        'rome" OR * NEAR(',
        "rome AND",
        "title:rome",
        "rome'; DROP TABLE documents; --",
        "^rome*",
        "rome \x00 \ud800",
        "_ __ rome",
        "rome " * 10_000,
        "-rome",
        "{title text} : rome",
    ],
)
def test_what_a_model_writes_is_never_syntax(index, query):
    """An error of the index's parser would end the trajectory, and syntax would let a model read what it should not."""
    assert "[1] Rome" in asked([query], index=str(index))[0].text


@pytest.mark.parametrize("query", ["", "  ", "?!", "\ud800", "-- * ()"])
def test_a_query_without_words_is_a_failed_call(index, query):
    (observation,) = asked([query], index=str(index))
    assert observation.failed
    assert observation.text == "The query has no words; write what to search for."


def test_finding_nothing_is_not_a_failure(index):
    (observation,) = asked(["zebra"], index=str(index))
    assert observation.text == "Nothing was found; try other words."
    assert not observation.failed


def test_each_call_of_a_turn_is_answered_in_its_order(index):
    first, second = asked(["wombats", "arena"], index=str(index), num_results=1)
    assert "wombats" in first.text
    assert "Rome" in second.text


def test_equal_queries_have_equal_answers_though_ranks_tie(tmp_path):
    """A run with a search is repeated exactly only if ties have an order."""
    documents = [{"title": f"t{number}", "text": "same words"} for number in range(50)]
    build([written(tmp_path / "d.jsonl", documents)], tmp_path / "i.db")
    found = [asked(["same"], index=str(tmp_path / "i.db"))[0].text for _ in range(3)]
    assert found == ["[1] t0\nsame words\n\n[2] t1\nsame words\n\n[3] t2\nsame words"] * 3
    assert Search(index="i").is_repeatable
    assert not Search(endpoint="http://x").is_repeatable


def test_an_excerpt_is_the_part_with_most_of_the_words():
    text = " ".join(["filler"] * 40 + ["Eiffel", "tower,", "Paris"] + ["filler"] * 40)
    assert excerpt(text, ["eiffel", "paris", "tower"], 4) == "... filler Eiffel tower, Paris ..."
    assert excerpt("one two", ["x"], 2) == "one two"
    assert excerpt("one two three", ["x"], 2) == "one two ..."
    assert excerpt("one two three", ["three"], 2) == "... two three"


def test_words_that_are_everywhere_are_left_out_of_queries(tmp_path, monkeypatch):
    """They take most of the time of a query and say nothing."""
    monkeypatch.setattr("mgrpo.environments.tools.indexing._FEW_DOCUMENTS", 100)
    monkeypatch.setattr("mgrpo.environments.tools.indexing._SAMPLE", 50)
    documents = [{"text": f"the number {number}"} for number in range(200)]
    build([written(tmp_path / "d.jsonl", documents)], tmp_path / "i.db")
    index = LocalIndex(str(tmp_path / "i.db"))
    assert [passage.text for passage in index.found("the 77", 5)] == ["the number 77"]
    assert len(index.found("the number", 5)) == 5, "a query of such words only still finds something"
    asyncio.run(index.close())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected exactly one of them"),
        ({"index": "a", "endpoint": "b"}, "expected exactly one of them"),
        (
            {"endpoint": "localhost:8000/search"},
            "endpoint='localhost:8000/search', expected an address, for example http://",
        ),
        ({"index": "a", "num_results": 0}, "num_results=0, expected a whole number of at least 1"),
        ({"index": "a", "max_words": "9"}, "max_words='9', expected a whole number"),
        ({"index": "a", "parameters": {"x": 1}}, "an index has none"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Search(**settings)


def test_a_file_that_is_not_an_index_is_refused_with_the_command(tmp_path):
    missing, text, other = tmp_path / "missing.db", tmp_path / "text.db", tmp_path / "other?.db"
    text.write_text("not a database" * 100)
    sqlite3.connect(other).executescript("CREATE TABLE t (a)")
    for path, problem in ((missing, "does not exist"), (text, "is no index"), (other, "is no index")):
        with pytest.raises(ValueError, match=problem) as caught:
            LocalIndex(str(path))
        assert f"mgrpo index DOCUMENTS.jsonl --out {path}" in str(caught.value)
    index = tmp_path / "old.db"
    build([written(tmp_path / "d.jsonl", DOCUMENTS)], index)
    sqlite3.connect(index).execute("PRAGMA user_version = 9")
    with pytest.raises(ValueError, match="is an index of version 9, expected one of version 1"):
        LocalIndex(str(index))


def test_the_index_is_never_written(index):
    """Many workers read it at once; one that could write would lock the others out."""
    opened = LocalIndex(str(index))
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        opened._connection.execute("DELETE FROM documents")
    asyncio.run(opened.close())


def test_the_command_reads_compressed_files_and_other_columns(tmp_path, capsys):
    lines = "".join(json.dumps({"id": n, "contents": f"passage {n}"}) + "\n\n" for n in range(3))
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write(lines)
    out = tmp_path / "i.db"
    assert index_command([str(tmp_path / "d.jsonl.gz"), "--out", str(out), "--text_field", "contents"]) == 0
    assert "3 documents" in capsys.readouterr().out
    assert asked(["2"], index=str(out))[0].text == "[1]\npassage 2"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "good"}\n{"text": ', "d.jsonl:2: not JSON"),
        ('["text"]', "d.jsonl:1: found ['text'], expected an object with text"),
        ('{"body": "b"}', "d.jsonl:1: found text None among body, expected text; choose its column with --text_field"),
        ('{"text": "a", "title": 3}', "d.jsonl:1: found title 3, expected text"),
        ("\n", "the files hold no document"),
    ],
)
def test_a_bad_document_is_named_and_nothing_is_left(tmp_path, capsys, line, problem):
    (tmp_path / "d.jsonl").write_text(line)
    assert index_command([str(tmp_path / "d.jsonl"), "--out", str(tmp_path / "i.db")]) == 2
    assert problem in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]


def test_an_existing_file_is_not_replaced(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("precious")
    documents = written(tmp_path / "d.jsonl", DOCUMENTS)
    assert index_command([str(documents), "--out", str(tmp_path / "mine.txt")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert index_command([str(documents), "--out", str(tmp_path / "no" / "i.db")]) == 2
    assert index_command([str(tmp_path / "missing.jsonl"), "--out", str(tmp_path / "i.db")]) == 2


def test_half_characters_of_documents_are_stored_as_question_marks(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "half \\ud83d of a smile"}')
    build([tmp_path / "d.jsonl"], tmp_path / "i.db")
    assert asked(["smile"], index=str(tmp_path / "i.db"))[0].text == "[1]\nhalf ? of a smile"


@pytest.mark.parametrize(
    ("results", "text"),
    [
        (["one", "two"], "[1]\none\n\n[2]\ntwo"),
        ([{"title": "T", "text": "one"}, {"snippet": "two"}], "[1] T\none\n\n[2]\ntwo"),
        ({"passages": [["one", "two", "three"]]}, "[1]\none\n\n[2]\ntwo"),
        ([], "Nothing was found; try other words."),
        ([None, 3], "[1]\nNone\n\n[2]\n3"),
    ],
)
def test_a_service_is_asked_with_query_and_number(service, results, text):
    service.answers = [(200, {"results": results})]
    (observation,) = asked(["who?"], endpoint=service.url, num_results=2, parameters={"domains": "wiki"})
    assert observation.text == text
    assert service.requests == [{"query": "who?", "n_docs": 2, "domains": "wiki"}]


def test_a_service_that_fails_for_a_moment_is_asked_again(service, monkeypatch):
    monkeypatch.setattr("mgrpo.environments.tools.search._PAUSE_S", 0.001)
    service.answers = [(503, b""), (502, b""), (200, {"results": ["one"]})]
    assert asked(["q"], endpoint=service.url)[0].text == "[1]\none"


@pytest.mark.parametrize(
    ("answer", "problem", "num_requests"),
    [
        ((400, b""), "not available (it answered with status 400)", 1),
        ((503, b""), "not available (it answered with status 503)", 3),
        ((200, b"<html>"), 'gave no {"results": ...}', 1),
        ((200, b"[1]"), 'gave no {"results": ...}', 1),
        ((200, {"results": "text"}), "gave results that are no list", 1),
        ((200, b"[" * 100_000), 'gave no {"results": ...}', 1),
        ((200, b" " * (20 << 20)), "not available (the answer is longer than 16,777,216 bytes)", 1),
        ((307, b""), "not available (it answered with status 307)", 1),
    ],
)
def test_a_service_that_fails_is_a_failed_call(service, monkeypatch, answer, problem, num_requests):
    monkeypatch.setattr("mgrpo.environments.tools.search._PAUSE_S", 0.001)
    service.answers = [answer]
    (observation,) = asked(["q"], endpoint=service.url)
    assert observation.failed
    assert problem in observation.text
    assert len(service.requests) == num_requests


def test_a_service_that_is_not_there_is_a_failed_call(monkeypatch):
    monkeypatch.setattr("mgrpo.environments.tools.search._PAUSE_S", 0.001)
    (observation,) = asked(["q"], endpoint="http://127.0.0.1:9/search")
    assert observation.failed
    assert "not available (ClientConnectorError" in observation.text
