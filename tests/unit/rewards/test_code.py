"""The verifiers `code` and `code_stdio`: what they send, how they make a score of the answer, and when there is none."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards import verify
from mgrpo.rewards.remote_endpoint import RemoteScorer
from mgrpo.rewards.verifier import Answer
from mgrpo.rewards.verifiers import code
from mgrpo.rewards.verifiers.code import Code, CodeStdio, extract_program, service_url
from tests.namespaces import skip_without_namespaces

ASSERTS = ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 4", "assert f(4) == 5"]
STDIO = [{"input": "1", "output": "2"}]


@dataclass
class Service:
    """A scripted code service: gives its answers in turn, the last one for ever, and keeps what it was asked."""

    url: str = ""
    encoding: str = ""
    piece: int = 0
    """Bytes that are sent at a time, `drip_s` apart; 0: all."""
    drip_s: float = 0.0
    is_over: threading.Event = field(default_factory=threading.Event)
    answers: list[tuple[int, object]] = field(default_factory=list)
    asked: list[tuple[str, dict]] = field(default_factory=list)


@pytest.fixture
def service() -> Iterator[Service]:
    script = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            script.asked.append((self.path, json.loads(body)))
            status, answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            if status == 0:
                self.close_connection = True
                return
            text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Location", f"{script.url}/elsewhere")
            if script.encoding:
                text = gzip.compress(text)
                self.send_header("Content-Encoding", script.encoding)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            for start in range(0, len(text), script.piece or len(text)):
                self.wfile.write(text[start : start + (script.piece or len(text))])
                script.is_over.wait(script.drip_s)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        script.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield script
        script.is_over.set()
        server.shutdown()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(code, "_PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.delenv("CODE_API_URL", raising=False)


def score(verifier: type[Code], completion: str, label: object, settings: Reward) -> float:
    async def run() -> float:
        instance = verifier(settings)
        try:
            return await instance.score(Answer(completion=completion, ground_truth=label))
        finally:
            await instance.close()

    return asyncio.run(run())


def answer(results: list[int], runtimes: list[float] | None = None) -> tuple[int, object]:
    return 200, {"results": results, "runtimes": runtimes or [0.1] * len(results)}


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("Here:\n```python\nx = 1\n```\ndone", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\na\n```\n```\nb\n```", "b"),
        ("```\nb\n```\n```python\na\n```", "a"),
        ("x = 1", "x = 1"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("```python x = 1```", "x = 1"),
        ("```py\nx = 1\n```", "py\nx = 1"),
        ("``````", ""),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block(completion, program):
    """Open Instruct's rule: a model that explains first and a model that only writes code are judged alike."""
    assert extract_program(completion) == program


@pytest.mark.parametrize(
    "url",
    [
        "http://h:1",
        "http://h:1/",
        "http://h:1/test_program",
        "http://h:1/test_program/",
        "http://h:1/test_program_stdio",
    ],
)
def test_the_address_may_name_a_path(url):
    """Their setting holds the path, their environment variable does not."""
    assert service_url(url) == "http://h:1"
    assert service_url(None) is None and service_url("") is None
    assert service_url("http://h/api/test_program") == "http://h/api"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:1234",
        "h",
        "/test_program",
        "ftp://h",
        "http://",
        "http://:80/x",
        "http://[h",
        "http://h:port",
        " ",
        "http://a b",
    ],
)
def test_what_is_no_address_is_said_before_the_start(url, monkeypatch):
    """Every program of the run would be without a score, after retries."""
    (problem,) = Code.problems(Reward(code_api_url=url))
    assert problem.startswith(f"code_api_url={url!r} is not an address")
    assert CodeStdio.problems(Reward(code_api_url=url)) == [problem]
    with pytest.raises(ValueError, match="code_api_url"):
        Code(Reward(code_api_url=url))
    assert Code.problems(Reward(code_api_url="HTTPS://h:1/test_program")) == []
    if url.strip():
        monkeypatch.setenv("CODE_API_URL", url)
        assert "CODE_API_URL in the environment=" in Code.problems(Reward())[0]
    assert Code.problems(Reward(code_api_url="http://[::1]:7")) == []


def test_the_request_is_open_instructs(service, monkeypatch):
    """A service of theirs must understand it."""
    service.answers = [answer([1])]
    settings = Reward(code_api_url=f"{service.url}/test_program", code_max_execution_time=2.5)
    assert score(Code, "```python\nx\n```", json.dumps(ASSERTS[:1]), settings) == 1.0
    monkeypatch.setenv("CODE_API_URL", service.url)
    assert score(CodeStdio, "x", [STDIO], Reward()) == 1.0
    assert service.asked == [
        ("/test_program", {"program": "x", "tests": ASSERTS[:1], "max_execution_time": 2.5}),
        ("/test_program_stdio", {"program": "x", "tests": STDIO, "max_execution_time": 1.0}),
    ]


@pytest.mark.parametrize(
    ("settings", "results", "runtimes", "expected"),
    [
        ({}, [1, 0, 1, 1], None, 0.75),
        ({}, [0, 0, 0, 0], None, 0.0),
        ({"code_pass_rate_reward_threshold": 0.75}, [1, 0, 1, 1], None, 0.75),
        ({"code_pass_rate_reward_threshold": 0.76}, [1, 0, 1, 1], None, 0.0),
        ({"code_apply_perf_penalty": True}, [1, 1, 1, 1], [0.0, 0.5, 1.0, 0.25], (1 + 0.5 + 0 + 0.75) / 4),
        ({"code_apply_perf_penalty": True}, [1, 0, 0, 1], [0.5, -1.0, 0.9, 0.5], 0.25),
        ({"code_apply_perf_penalty": True, "code_max_execution_time": 2.0}, [1] * 4, [1.0] * 4, 0.5),
        (
            {"code_apply_perf_penalty": True, "code_pass_rate_reward_threshold": 0.9},
            [1, 1, 1, 0],
            [0.0, 0.0, 0.0, -1.0],
            0.0,
        ),
    ],
)
def test_the_score_is_the_pass_rate(settings, results, runtimes, expected, service):
    """Threshold before penalty, and the penalty counts the share of the time that is left, for passed tests."""
    service.answers = [answer(results, runtimes)]
    assert score(Code, "x", ASSERTS, Reward(code_api_url=service.url, **settings)) == pytest.approx(expected)


def test_tests_that_can_be_forged_are_counted(service):
    """Their share is how much of the reward a program could have taken by itself; another service does not say it."""
    service.answers = [(200, answer([1, 0, 1, 1])[1] | {"in_process": [0, 1, 1, 0]}), answer([1, 0, 1, 1])]

    async def run() -> dict[str, float]:
        verifier = Code(Reward(code_api_url=service.url))
        for _ in range(2):
            await verifier.score(Answer(completion="x", ground_truth=ASSERTS))
        await verifier.close()
        return verifier.metrics()

    assert asyncio.run(run()) == {"tests": 8, "tests_in_process": 2}


@pytest.mark.parametrize("trouble", [(500, "x"), (502, ""), (503, {"detail": "busy"}), (504, ""), (0, "")])
def test_a_service_in_trouble_is_asked_again(trouble, service):
    """A service that restarts must not cost a step its scores."""
    service.answers = [trouble] * 3 + [answer([1, 1, 0, 0])]
    assert score(Code, "x", ASSERTS, Reward(code_api_url=service.url)) == 0.5
    assert len(service.asked) == 4


@pytest.mark.parametrize(
    ("reply", "num_asked"),
    [
        ((500, "broken"), 4),
        ((422, {"detail": "no tests"}), 1),
        ((404, ""), 1),
        ((200, "not JSON"), 1),
        ((200, "<html>Please log in</html>"), 1),
        ((200, '{"results":' * 500), 1),
        ((307, ""), 1),
        ((429, {"detail": "slow down"}), 1),
        ((200, {"results": [1]}), 1),
        ((200, {"results": [], "runtimes": []}), 1),
        ((200, {"results": [1, 1], "runtimes": [0.1, 0.1]}), 1),
        ((200, [1, 1, 1, 1]), 1),
        (answer([1, 1, 1, 1000000]), 1),
        (answer([1, 1, 1, -1]), 1),
        (answer([1, 1, 1, 0.5]), 1),
        (answer([1, 1, 1, "1"]), 1),
        (answer([1, 1, 1, float("nan")]), 1),
        (answer([1, 1, 1, 1], [0.1, 0.1, 0.1, -1e9]), 1),
        (answer([1, 1, 1, 1], [0.1, 0.1, 0.1, -1]), 1),
        (answer([1, 1, 1, 0], [0.1, 0.1, 0.1, 1e300]), 1),
        (answer([1, 1, 1, 1], [0.1, 0.1, 0.1, float("nan")]), 1),
        (answer([1, 1, 1, 1], [0.1, 0.1, 0.1, None]), 1),
        ((200, json.dumps(answer([1, 1, 1, 1])[1]) + " " * 100_000), 1),
    ],
)
def test_a_failure_of_the_service_is_no_score(reply, num_asked, service):
    """Scored 0, a broken service would tell the policy that everything it wrote was wrong."""
    service.answers = [reply]
    with pytest.raises((RuntimeError, ValueError)):
        score(Code, "x", ASSERTS, Reward(code_api_url=service.url))
    assert len(service.asked) == num_asked


def test_a_compressed_reply_is_refused(service):
    """Unpacked, a few hundred kilobytes became gigabytes in the process that trains."""
    service.answers, service.encoding = [answer([1, 1, 1, 1])], "gzip"
    with pytest.raises(ValueError, match=r"http://.*: the answer is in Content-Encoding gzip"):
        score(Code, "x", ASSERTS, Reward(code_api_url=service.url))


def test_a_service_that_answers_byte_by_byte_is_given_up(service, monkeypatch):
    """Each byte comes in time: a limit for each read would hold the step for an hour."""
    monkeypatch.setattr(code, "client_limit_s", lambda limit_s: 0.3)
    service.answers, service.piece, service.drip_s = [answer([1, 1, 1, 1])], 1, 0.05
    with pytest.raises(TimeoutError):
        score(Code, "x", ASSERTS, Reward(code_api_url=service.url))
    assert len(service.asked) == 1


def test_a_service_that_is_not_there_is_no_score():
    """The first thing that goes wrong is the address."""
    scorer = RemoteScorer(Reward(code_api_url="http://127.0.0.1:9"))
    from tests.unit.rewards.items import item

    assert math.isnan(scorer.verify_many([item("code", "x", ASSERTS)])[0])
    assert scorer.errors == {"code": 1}
    scorer.close()


@pytest.mark.parametrize("label", [[], "[]", "assert f(1) == 2", 7, [7], None])
def test_a_label_without_tests_is_no_score(label, service):
    """Nothing can pass it, so nothing is wrong."""
    service.answers = [answer([1])]
    with pytest.raises(ValueError, match="test"):
        score(Code, "x", label, Reward(code_api_url=service.url))
    assert service.asked == []


def test_a_program_that_cannot_be_sent_is_wrong(service):
    """Half a surrogate pair is no source of Python; an exception would leave a hostile answer without a score."""
    assert score(Code, "x = '\ud800'", ASSERTS, Reward(code_api_url=service.url)) == 0.0


def test_without_an_address_programs_run_here():
    """The quickest start: no service to set up, the same verdicts."""
    plenty = {"code_max_execution_time": 20.0, "code_sandbox_memory_mb": 256}
    skip_without_namespaces()
    assert verify("code", "```python\ndef f(x): return x + 1 if x < 4 else 0\n```", ASSERTS, **plenty) == 0.75
    assert verify("code", "\x00", ASSERTS, **plenty) == verify("code", "", ASSERTS, **plenty) == 0.0
    assert verify("code_stdio", "print(int(input()) + 1)", json.dumps(STDIO), **plenty) == 1.0
    assert math.isnan(verify("code_stdio", "print(1)", "no tests", **plenty))


def test_a_machine_that_cannot_isolate_is_refused_at_once(monkeypatch):
    """A run that starts without walls, or scores nothing for a week, is found out too late."""
    refusal = ValueError("this machine cannot isolate untrusted programs; code_sandbox_accept_risk=true accepts it")
    monkeypatch.setattr("mgrpo.sandbox.sandbox.Sandbox.start", lambda self: (_ for _ in ()).throw(refusal))
    with pytest.raises(ValueError, match="code_sandbox_accept_risk=true"):
        Code(Reward(code_sandbox_memory_mb=99))
