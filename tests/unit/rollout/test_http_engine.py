"""A server's answers that a real one gives only in another state or with another command line, by a server of the same words."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from mgrpo.moving import from_values
from mgrpo.rollout.engine import EngineError, Sampling
from mgrpo.rollout.vllm.server import server_calls
from mgrpo.rollout.vllm.server.http_engine import HttpEngine
from mgrpo.rollout.vllm.server.server_calls import ServerError
from tests.sampling import prompt_batch
from tests.unit.rollout.test_server_facts import CONFIG, INFO

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"
EMPTY = {"error": {"message": "token_ids must not be empty", "code": 422}}
CLOSED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
Answers = dict[str, tuple[int, object]]


class Scripted:
    """Answers each path as told: in JSON, in bytes as they are, or as a function of the request's handler does."""

    def __init__(self) -> None:
        self.answers: Answers = {
            "/health": (200, None),
            "/server_info?config_format=json": (200, INFO),
            "/inference/v1/generate": (422, EMPTY),
            "/is_paused": (200, {"is_paused": False}),
        }
        self.location: str | None = None
        """Of another server, which answers refer to."""
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.go_on = threading.Event()
        """Prompts are answered only then."""
        self.go_on.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                outer.asked.append(self.path)
                outer.tokens.add(self.headers.get("Authorization"))
                if "token_ids" in body:
                    outer.go_on.wait(20)
                status, said = outer.answers.get(self.path, (200, {}))
                if callable(said):
                    self.close_connection = True
                    with suppress(OSError):
                        said(self)
                    return
                text = b"" if said is None else said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                if outer.location:
                    self.send_header("Location", outer.location + self.path)
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET

            def log_message(self, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.close()


def engine_of(url: str, **values: object) -> HttpEngine:
    own = {**CONFIG, "model_name_or_path": str(MODEL), "vllm_server_base_url": [url], "vllm_server_timeout": 0.1}
    return HttpEngine(url, from_values({**own, **values}))


@pytest.fixture
def engine(server) -> Iterator[HttpEngine]:
    """One that is ready."""
    engine = engine_of(server.url)
    engine.ready.result(10)
    yield engine
    engine.close()


def failure(url: str) -> str:
    """Of the start, which leaves the server alone."""
    engine = engine_of(url)
    try:
        with pytest.raises(ServerError) as failed:
            engine.ready.result(10)
    finally:
        engine.close()
    return str(failed.value)


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/health", (503, None), "no vLLM server is ready there within vllm_server_timeout=0.1 s: its engine has died; restart"),
        ("/health", (404, None), "what answers there is not a vLLM server"),
        ("/server_info?config_format=json", (404, {"detail": "Not Found"}), "start it with VLLM_SERVER_DEV_MODE=1"),
        ("/inference/v1/generate", (403, {"error": {"message": CLOSED}}), "start it with --enable-scale-out"),
        ("/inference/v1/generate", (401, {"error": "Unauthorized"}), "set MGRPO_VLLM_SERVER_TOKEN in the environment"),
        ("/inference/v1/generate", (200, {}), "answers a prompt without tokens"),
        (
            "/init_weight_transfer_engine",
            (500, {"error": {"message": "Call to collective_rpc method failed: another model"}}),
            ": another model",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_at_the_start(server, path, answer, words, monkeypatch):
    """And a server that cannot serve the run, or serves another, is not paused."""
    monkeypatch.setattr(server_calls, "RETRY_S", 0.01)
    server.answers[path] = answer
    said = failure(server.url)
    assert said.startswith(f"vllm_server_base_url={server.url}: ") and words in said
    assert not any(path.startswith(("/pause", "/resume", "/shutdown")) for path in server.asked)


def test_a_server_that_is_not_there_is_waited_for_and_then_named(monkeypatch):
    """It may still be loading its model."""
    monkeypatch.setattr(server_calls, "RETRY_S", 0.01)
    gone = Scripted()
    gone.close()
    said = failure(gone.url)
    assert "no vLLM server is ready there within vllm_server_timeout=0.1 s: /health: " in said and "start it" in said


def test_the_token_is_in_every_request_and_nowhere_else(server, monkeypatch):
    """Arguments are seen by every user of the machine, messages by every reader of the log."""
    monkeypatch.setenv("MGRPO_VLLM_SERVER_TOKEN", "secret-1")
    server.answers["/server_info?config_format=json"] = (401, {"error": "Unauthorized"})
    assert "secret-1" not in failure(server.url)
    assert server.tokens == {"Bearer secret-1"}


def test_the_token_is_not_carried_elsewhere(server, monkeypatch):
    """Whoever answers at the address could collect it otherwise, and would be taken for the engine."""
    monkeypatch.setenv("MGRPO_VLLM_SERVER_TOKEN", "secret-1")
    other = Scripted()
    server.location, server.answers["/health"] = other.url, (307, None)
    assert "what answers there is not a vLLM server" in failure(server.url)
    assert other.asked == []
    other.close()


SAMPLING = Sampling(num_samples=2, max_tokens=4, temperature=1.0, stop_token_ids=(1,))
CHOICES = [
    {
        "index": 1,
        "token_ids": [7],
        "finish_reason": "length",
        "logprobs": {"content": [{"token_id": 7, "logprob": -9999.0, "rank": None, "top_logprobs": []}]},
        "weight_versions": None,
    },
    {
        "index": 0,
        "token_ids": [5, 6, 1],
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": t, "logprob": -float(t), "rank": 1} for t in (5, 6, 1)]},
        "weight_versions": [{"start": 0, "end": 2, "version": "3"}, {"start": 2, "end": 3, "version": "4"}],
    },
]  # fmt: skip


def test_an_answer_becomes_what_other_engines_give(server, engine):
    """Sample by sample in their order, each token with its version; what the server cannot write in JSON is not finite."""
    server.answers["/inference/v1/generate"] = (200, {"choices": CHOICES, "usage": {}})
    engine.submit(prompt_batch([np.arange(2, 5)], SAMPLING, first=8, seeds=np.array([2**61])))
    engine.resume().result(10)
    answer = engine.poll().result(10)
    assert answer["numbers"].tolist() == [8] and answer["sizes"].tolist() == [2]
    assert answer["tokens"].tolist() == [5, 6, 1, 7] and answer["cu_seqlens"].tolist() == [0, 3, 4]
    assert answer["logprobs"].tolist() == [-5, -6, -1, -np.inf] and answer["logprobs"].dtype == np.float32
    assert answer["policy_versions"].tolist() == [3, 3, 4, 0] and answer["finish_reasons"].tolist() == [0, 1]


def test_a_pause_that_drains_waits_for_the_answers(server, engine):
    """The server would pause at once, and the completions of a synchronous run would be of two versions."""
    server.answers["/inference/v1/generate"] = (200, {"choices": CHOICES})
    server.go_on.clear()
    engine.resume().result(10)
    engine.submit(prompt_batch([np.arange(2, 5)], SAMPLING)).result(10)
    pauses = sum(path.startswith("/pause") for path in server.asked)
    paused = engine.pause("drain")
    with pytest.raises(TimeoutError):
        paused.result(0.2)
    assert sum(path.startswith("/pause") for path in server.asked) == pauses
    server.go_on.set()
    paused.result(10)
    assert server.asked[-1] == "/pause?mode=keep&clear_cache=true"


def test_an_update_that_failed_must_be_made_up_for(server, engine):
    """Half of the weights are of another version: nothing may be sampled with them, also by whoever comes next."""
    server.answers["/update_weights"] = (500, {"error": {"message": "Call to collective_rpc method failed: lost"}})
    with pytest.raises(EngineError, match=r"^server http.*: HTTP 500: lost$"):
        engine.receive_weights(3, check=False, seed=1).result(10)
    with pytest.raises(EngineError, match="must receive all weights before it samples"):
        engine.resume().result(10)
    engine.close()
    assert "/resume" not in server.asked


def test_a_server_that_was_found_paused_gets_weights_first(server):
    """The run before has died in the middle of an update, perhaps; this one may end before its first."""
    server.answers["/is_paused"] = (200, {"is_paused": True})
    for receives in (False, True):
        engine = engine_of(server.url)
        engine.ready.result(10)
        if receives:
            engine.receive_weights(0, check=False, seed=1).result(10)
        engine.close()
        assert ("/resume" in server.asked) == receives


def test_an_update_that_an_earlier_run_left_is_ended(server, engine):
    """Otherwise the server would have to be restarted."""
    message = (
        "Call to collective_rpc method failed: start_weight_update called while a weight update is already active."
    )
    server.answers["/start_weight_update"] = (500, {"error": {"message": message}})
    began = len(server.asked)
    with pytest.raises(EngineError, match="already active"):
        engine.seed(1).result(10)
    assert server.asked[began:] == ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]


def test_a_server_that_dies_fails_what_waits_for_it(server, engine):
    """The run is to say so at once, and not after rollout_timeout."""
    server.go_on.clear()
    engine.submit(prompt_batch([np.arange(2, 5)], SAMPLING)).result(10)
    waiting = engine.poll()
    server.answers["/inference/v1/generate"] = (500, {"error": {"message": "EngineCore encountered an issue"}})
    server.go_on.set()
    assert str(waiting.exception(10)) == f"server {server.url}: HTTP 500: EngineCore encountered an issue"


def test_a_server_that_falls_silent_is_noticed(server, monkeypatch):
    """Its connections stay open when its machine has lost its network."""
    monkeypatch.setattr(server_calls, "HEALTH_EVERY_S", 0.05)
    engine = engine_of(server.url)
    engine.ready.result(10)
    waiting = engine.poll()
    server.answers["/health"] = (503, None)
    assert "the server does not answer any more: HTTP 503" in str(waiting.exception(10))
    engine.close()


def test_closing_ends_every_wait_and_gives_the_server_back(server, engine):
    """A thread that waits would keep the process for an hour; a server that stays paused or joined, the next run."""
    engine.join({"host": "here"}).result(10)
    waiting = engine.poll()
    engine.close()
    assert str(waiting.exception(1)) == str(engine.poll().exception(1)) == "the engine was closed"
    assert server.asked[-2:] == ["/shutdown_weight_transfer_engine", "/resume"]
