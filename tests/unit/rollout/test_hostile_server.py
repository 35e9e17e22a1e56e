"""A server whose answers are wrong: one sentence that names it, within a limit of time and memory, and never a number to train on."""

from __future__ import annotations

import copy
import gzip
import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest

from mgrpo.rollout.engine import EngineError, Sampling, WrongAnswerError
from mgrpo.rollout.vllm.server import server_calls, server_connection
from mgrpo.rollout.vllm.server.http_engine import HttpEngine
from tests.sampling import prompt_batch
from tests.unit.rollout.test_http_engine import Scripted, engine_of, failure

GENERATE = "/inference/v1/generate"
SAMPLING = Sampling(num_samples=2, max_tokens=4, temperature=1.0, stop_token_ids=(1,))
VERSION = 3


def choice(index: int, *tokens: int, **fields: Any) -> dict[str, Any]:
    """One completion, as a server in good order gives it."""
    content = [{"token_id": token, "logprob": -0.5} for token in tokens]
    return {
        "index": index,
        "token_ids": list(tokens),
        "finish_reason": "length",
        "logprobs": {"content": content},
        "weight_versions": [{"start": 0, "end": len(tokens), "version": str(VERSION)}],
        **fields,
    }


def changed(change: Callable[[list[dict[str, Any]]], object]) -> dict[str, Any]:
    choices = [choice(0, 5, 6, 1), choice(1, 7)]
    change(choices)
    return {"choices": choices}


@pytest.fixture
def server() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.close()


@pytest.fixture
def engine(server) -> Iterator[HttpEngine]:
    """One that samples, with weights of version 3."""
    engine = engine_of(server.url)
    engine.ready.result(10)
    engine.receive_weights(VERSION, check=False, seed=1).result(10)
    engine.resume().result(10)
    yield engine
    engine.close()


def refusal(engine: HttpEngine, sampling: Sampling = SAMPLING, *, kind: type[EngineError] = WrongAnswerError) -> str:
    """The failure of a prompt."""
    engine.submit(prompt_batch([np.arange(2, 5)], sampling)).result(10)
    error = engine.poll().exception(10)
    assert type(error) is kind, error
    assert str(error).startswith(f"server {engine.url}: ") and "\n" not in str(error) and len(str(error)) < 2500
    return str(error)


def logprob(value: object) -> Callable[[list[dict[str, Any]]], object]:
    return lambda choices: choices[1]["logprobs"]["content"][0].update(logprob=value)


def spans(*found: tuple[int, int, str]) -> Callable[[list[dict[str, Any]]], object]:
    versions = [{"start": start, "end": end, "version": version} for start, end, version in found]
    return lambda choices: choices[0].update(weight_versions=versions)


SPANS: list[dict[str, Any]] = [{"weight_versions": []}, {}]
"""Of completions of so many tokens."""


WRONG: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "a sample less": (lambda choices: choices.pop(), "1 completion instead of 2"),
    "a sample more": (lambda choices: choices.append(choice(2, 3)), "3 completions instead of 2"),
    "no sample": (lambda choices: choices.clear(), "0 completions instead of 2"),
    "a sample twice": (lambda choices: choices[1].update(index=0), "completions 0, 0 instead of 0, 1"),
    "more tokens than asked for": (
        lambda choices: choices.__setitem__(0, choice(0, 5, 6, 7, 8, 9)),
        "a completion of 5 tokens, asked for 1 to 4",
    ),
    "no token": (lambda choices: choices.__setitem__(1, choice(1)), "a completion of 0 tokens, asked for 1 to 4"),
    "fewer log-probabilities": (
        lambda choices: choices[0]["logprobs"]["content"].pop(),
        "log-probabilities that are not one for each of its tokens",
    ),
    "more log-probabilities": (
        lambda choices: choices[1]["logprobs"]["content"].append({"token_id": 7, "logprob": -1.0}),
        "log-probabilities that are not one for each of its tokens",
    ),
    "none": (lambda choices: choices[1].update(logprobs=None), "log-probabilities that are not one for each of its tokens"),
    "another token's": (
        lambda choices: choices[1]["logprobs"]["content"][0].update(token_id=8),
        "log-probabilities that are not one for each of its tokens",
    ),
    "a positive one": (logprob(0.25), "a log-probability of 0.25"),
    "a huge one": (logprob(1e300), "a log-probability of 1e+300"),
    "one that is no number": (logprob(float("nan")), "cannot be read"),
    "an infinite one": (logprob(float("inf")), "cannot be read"),
    "a text": (logprob("-0.5"), "cannot be read"),
    "a token beyond the vocabulary": (
        lambda choices: choices.__setitem__(1, choice(1, 10**6)),
        "token 1000000, the vocabulary has 0 to ",
    ),
    "a negative token": (lambda choices: choices.__setitem__(1, choice(1, -1)), "token -1, the vocabulary has 0 to "),
    "a token beyond all integers": (lambda choices: choices.__setitem__(1, choice(1, 2**62)), f"token {2**62}, "),
    "a reason that nobody knows": (lambda choices: choices[1].update(finish_reason="bored"), "finish_reason bored"),
    "an abort with tokens beyond the vocabulary": (
        lambda choices: choices.__setitem__(1, choice(1, 10**6, finish_reason="abort")),
        "token 1000000, the vocabulary has 0 to ",
    ),
    "no version": (lambda choices: choices[1].update(weight_versions=None), "tokens whose weights have no version"),
    "no version of some tokens": (spans((0, 2, "3")), "tokens whose weights have no version"),
    "a version of no token": (spans((0, 2, "3"), (2, 9, "3")), "tokens whose weights have no version"),
    "tokens of two versions": (spans((0, 3, "3"), (1, 3, "3")), "tokens whose weights have no version"),
    "a span backwards": (spans((0, 5, "3"), (5, 3, "3")), "tokens whose weights have no version"),
    "weights of long ago": (spans((0, 3, "2")), "weights of version 2, the run has sent 3"),
    "weights of another run": (spans((0, 3, "4")), "weights of version 4, the run has sent 3"),
    "weights of its own": (spans((0, 3, "default")), "weights of version default, the run has sent 3"),
    "weights of no number": (spans((0, 3, "x" * 1000)), "weights of version xxxx"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_an_answer_that_does_not_fit_the_question_is_refused(server, engine, what):
    """Each would be trained on, or would stop a learner with an error of its own: with other lengths the arrays of all groups shift."""
    change, words = WRONG[what]
    server.answers[GENERATE] = (200, changed(change))
    assert words in refusal(engine, kind=EngineError if words == "cannot be read" else WrongAnswerError)


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("tokens", [(), (7,)])
def test_a_server_that_breaks_completions_off_is_not_given_up_for_good(server, engine, reason, tokens):
    """An operator's /abort_requests, or an engine that starts anew, would take the server from the run until its end."""
    server.answers[GENERATE] = (
        200,
        changed(lambda c: c.__setitem__(1, choice(1, *tokens, finish_reason=reason, **SPANS[len(tokens)]))),
    )
    assert f"broken off a completion itself, with finish_reason {reason}" in refusal(engine, kind=EngineError)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_prompt_that_a_server_refuses_fails_alone(server, engine, status):
    """It was asked of each server again and again, as each came back."""
    said = {"error": {"message": "prompt too long", "type": "BadRequestError", "code": status}}
    server.answers[GENERATE] = (status, said)
    engine.submit(prompt_batch([np.arange(2, 5)], SAMPLING))
    found = engine.poll().result(10)
    assert found["numbers"].tolist() == [] and found["refused"].tolist() == [0]
    assert found["refusals"].tolist() == [f"server {server.url}: HTTP {status}: prompt too long"]
    engine.pause("drain").result(10)
    engine.resume().result(10)
    server.answers[GENERATE] = (200, changed(lambda choices: None))
    engine.submit(prompt_batch([np.arange(2, 5)], SAMPLING, first=1))
    assert engine.poll().result(10)["numbers"].tolist() == [1]


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_a_server_that_refuses_everything_is_an_engine_that_has_failed(server, engine, status):
    """The prompt is not at fault, and another server may answer it."""
    server.answers[GENERATE] = (status, {"error": {"message": "no"}})
    assert f"HTTP {status}: no" in refusal(engine, kind=EngineError)


CUT = Sampling(num_samples=2, max_tokens=4, temperature=1.0, stop_token_ids=(1,), top_k=2)


@pytest.mark.parametrize(
    ("candidates", "words"),
    [
        ([{"token_id": 10**6, "logprob": -0.5}], "token 1000000, the vocabulary has 0 to "),
        ([{"token_id": -7, "logprob": -0.5}], "token -7, the vocabulary has 0 to "),
        ([{"token_id": 7, "logprob": 3.0}], "a log-probability of 3"),
    ],
)
def test_sets_that_nothing_was_sampled_from_are_refused(server, candidates, words):
    """They become the softmax's denominator."""
    engine = engine_of(server.url, top_k=2)
    engine.ready.result(10)
    content = [{"token_id": 7, "logprob": -0.5, "top_logprobs": candidates}]
    server.answers[GENERATE] = (200, changed(lambda choices: choices[1].update(logprobs={"content": content})))
    engine.resume().result(10)
    assert words in refusal(engine, CUT)
    engine.close()


def raw(*pieces: bytes, head: bytes = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n") -> Callable[..., None]:
    """A reply byte for byte."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        for piece in (head, *pieces):
            handler.wfile.write(piece)

    return reply


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        handler.wfile.write(b"10000\r\n" + b" " * 65536 + b"\r\n")


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(10_000):
        handler.wfile.write(b" ")
        time.sleep(0.02)


BOMB = gzip.compress(b" " * (64 << 20))
GOOD = changed(lambda choices: None)
REPLIES: dict[str, tuple[int, object, str]] = {
    "HTML": (200, b"<html><body>Please log in</body></html>", "cannot be read"),
    "nothing": (200, None, "cannot be read"),
    "half of it": (200, json.dumps(GOOD).encode()[:-20], "cannot be read"),
    "no UTF-8": (200, b'{"choices": "\xff\xfe"}', "cannot be read"),
    "a list": (200, [1, 2], "cannot be read"),
    "a million brackets": (200, b"[" * 1_000_000, "cannot be read"),
    "a million objects": (200, b'{"choices":' * 100_000, "cannot be read"),
    "a number of a million digits": (200, b'{"choices": ' + b"9" * 1_000_000 + b"}", ""),
    "busy": (429, {"error": "slow down"}, "HTTP 429: slow down"),
    "a refusal in depth": (500, b"[" * 60_000, "HTTP 500: [["),
    "no end": (200, endless, f"{GENERATE}: the answer is longer than "),
    "a bomb": (
        200,
        raw(b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB), BOMB),
        f"{GENERATE}: the answer is in Content-Encoding gzip, asked for was none",
    ),
    "a cut": (200, raw(b"Content-Length: 1000\r\n\r\n", b'{"choices": ['), f"{GENERATE}: "),
    "a chunk that is none": (200, raw(b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\nfoo\r\n"), f"{GENERATE}: "),
    "no word": (200, raw(head=b""), f"{GENERATE}: "),
    "no HTTP": (200, raw(head=b"SSH-2.0-OpenSSH_9.6\r\n"), f"{GENERATE}: "),
    "a header without end": (200, raw(b"X: " + b"y" * 1_000_000, b"\r\n\r\n"), f"{GENERATE}: "),
}


@pytest.mark.parametrize("what", REPLIES)
def test_a_reply_that_is_no_answer_is_refused(server, engine, what):
    """Neither may it fill rank 0's memory, nor end a thread that the run waits for."""
    status, said, words = REPLIES[what]
    server.answers[GENERATE] = (status, said)
    assert words in refusal(engine, kind=EngineError)


def test_a_wait_that_the_server_asks_for_is_not_waited(server, engine):
    """A day of Retry-After is a run that hangs; its prompts go to other servers at once."""
    reply = raw(b"Retry-After: 86400\r\nContent-Length: 0\r\n\r\n", head=b"HTTP/1.1 503 Service Unavailable\r\n")
    server.answers[GENERATE] = (503, reply)
    assert "HTTP 503" in refusal(engine, kind=EngineError)


@pytest.mark.parametrize("path", ["/resume", "/pause?mode=keep&clear_cache=true", "/start_weight_update"])
def test_a_call_that_is_answered_byte_by_byte_ends(server, engine, path, monkeypatch):
    """Whoever waits for the engines would wait for ever: each byte comes in time, and /health is answered."""
    engine.calls.connection.limit_s = 0.2
    server.answers[path] = (200, drip)
    call = engine.seed(1) if path == "/start_weight_update" else engine.pause("recompute")
    if path == "/resume":
        call.result(10)
        call = engine.resume()
    assert str(call.exception(10)) == f"server {engine.url}: {path}: no answer within 0.2 s"


def test_the_time_for_calls_is_that_of_a_weight_sync(server):
    """Weights of a large model take minutes."""
    engine = engine_of(server.url, weight_sync_timeout=300)
    engine.ready.result(10)
    assert engine.calls.connection.limit_s == 300
    engine.close()


@pytest.mark.parametrize(
    ("path", "said", "words"),
    [
        ("/health", b"<html>Please log in</html>", "no vLLM server is ready there within vllm_server_timeout=0.1 s: /health: "),
        ("/server_info?config_format=json", b"<html>", "/server_info?config_format=json: the answer is not JSON: <html>"),
        ("/server_info?config_format=json", b"[" * 100_000, "the answer is not JSON: [["),
        ("/server_info?config_format=json", [], "the server does not say"),
        ("/server_info?config_format=json", {"vllm_config": {"model_config": "x"}}, "the server does not say"),
        ("/is_paused", [1], "/is_paused: the answer is [1], expected is_paused"),
        ("/is_paused", {}, "/is_paused: the answer is {}, expected is_paused"),
    ],
)  # fmt: skip
def test_a_start_with_what_is_no_server_is_one_sentence(server, path, said, words, monkeypatch):
    """A proxy that asks for a password answers everything with 200."""
    monkeypatch.setattr(server_calls, "RETRY_S", 0.01)
    server.answers[path] = (200, said)
    assert words in failure(server.url)


def test_a_start_that_is_answered_byte_by_byte_ends(server, monkeypatch):
    """It would end with engine_start_timeout, which does not say whose answer is missing."""
    monkeypatch.setattr(server_calls, "HEALTH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(server_connection, "ANSWER_S", 0.2)
    server.answers["/server_info?config_format=json"] = (200, drip)
    assert "/server_info?config_format=json: no answer within 0.2 s" in failure(server.url)


def test_a_health_without_end_is_a_death(server, monkeypatch):
    """The watch would have ended with an error that nobody sees, and the engine would never be missed."""
    monkeypatch.setattr(server_calls, "HEALTH_EVERY_S", 0.05)
    engine = engine_of(server.url)
    engine.ready.result(10)
    waiting = engine.poll()
    server.answers["/health"] = (200, b"<html>")
    assert "the server does not answer any more: /health: the answer is not JSON" in str(waiting.exception(10))
    engine.close()


def test_what_is_right_is_taken(server, engine):
    """The table above changes this answer in one place each."""
    server.answers[GENERATE] = (200, copy.deepcopy(GOOD))
    engine.submit(prompt_batch([np.arange(2, 5)], SAMPLING)).result(10)
    answer = engine.poll().result(10)
    assert answer["tokens"].tolist() == [5, 6, 1, 7] and answer["policy_versions"].tolist() == [VERSION] * 4
