"""The verifiers `code` and `code_stdio`: what they send, how they make a score of the answer, and when there is none."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import math
import pickle
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards import verify
from mgrpo.rewards.remote_endpoint import RemoteScorer
from mgrpo.rewards.verifier import Answer
from mgrpo.rewards.verifiers import code
from mgrpo.rewards.verifiers.answers.programs import extract_program
from mgrpo.rewards.verifiers.code import Code, CodeStdio, program_of, service_url
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


ADD, WRONG_ADD = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"


def fenced(program: str, info: str = "python") -> str:
    return f"```{info}\n{program}\n```\n"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("Here:\n```python\nx = 1\n```\ndone", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("x = 1", "x = 1"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("```python x = 1```", "x = 1"),
        ("```x = 1```", "x = 1"),
        ("", ""),
        ("<think>```python\nx = 0\n```\n</think>\n```python\nx = 1\n```", "x = 1"),
        ("<think>\n```python\nx = 1\n```\n</think>\nThis is it.", "x = 1"),
        ("<think>x</think>x = 1", "x = 1"),
        ("<think>\n```python\nx = 1\n```\nBut wait", ""),
    ],
)
def test_the_program_is_a_block_or_the_whole_answer(completion, program):
    """A model that explains first and a model that only writes code are judged alike; an unfinished thought is no answer."""
    assert program_of(completion) == program


@pytest.mark.parametrize(
    "info",
    [
        "py", "Python", "PYTHON", "python3", "python3.11", "python 3", 'python title="add.py"', "{.python .numberLines}", "{python}",
        "python:add.py", "python,linenos", " python", "ipython3", "py3", "", "python\r",
    ],
)  # fmt: skip
def test_the_info_string_of_a_fence_is_no_program_text(info):
    """`py` in front of a right program was a NameError: 0.0 for a spelling."""
    assert extract_program(fenced(ADD, info).replace("\n\n", "\n")).strip() == ADD


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (fenced(ADD) + "It prints\n" + fenced("3", ""), ADD),
        (fenced(ADD) + "It prints\n" + fenced("[1, 2]\nx = 3", ""), ADD),
        (fenced(ADD) + "Run it with\n" + fenced("python add.py", "bash"), ADD),
        (fenced(ADD) + fenced("int add(int a, int b);", "c"), ADD),
        (fenced(ADD) + fenced(">>> add(1, 2)", "python-repl"), ADD),
        (fenced(ADD) + fenced("{}", "json"), ADD),
        (fenced(WRONG_ADD) + "Corrected:\n" + fenced(ADD), ADD),
        (fenced(WRONG_ADD) + "Corrected:\n" + fenced(ADD, ""), ADD),
        (fenced(ADD) + "For example\n" + fenced("print(add(1, 2))"), ADD),
        (fenced(ADD) + fenced("from solution import add\nprint(add(1, 2))"), ADD),
        (fenced(ADD) + fenced("class Sum:\n    def add(self, b):\n        return b"), ADD),
        (fenced("x = 1") + fenced("y = 2"), "y = 2"),
        (fenced("3", "") + fenced("4", ""), "4"),
        (fenced("add = lambda a, b: a + b") + fenced("print(1)"), "add = lambda a, b: a + b"),
        (fenced("puts 1", "ruby"), ""),
        ("1. Like this:\n   ```python\n   def add(a, b):\n       return a + b\n   ```", ADD),
        (f"````python\n{ADD}\n````", ADD),
        (f"~~~python\n{ADD}\n~~~", ADD),
        (f"```python\n{ADD}```", ADD),
        (f"```python\n{ADD}\n```\n```python\ndef add(", ADD),
        (f'```python\n{ADD}\nFENCE = "```"\n```', f'{ADD}\nFENCE = "```"'),
        ('```python\ndef add(a, b):\n    """\n    ```\n    x\n    ```\n    """\n```', 'def add(a, b):\n    """\n    ```\n    x\n    ```\n    """'),
        (f"```text\nthree\n```python\n{ADD}\n```", ADD),
        ("Use `add` or ```a + b```.\n" + fenced(ADD), ADD),
    ],
)  # fmt: skip
def test_of_several_blocks_the_last_that_defines_what_the_tests_call(completion, program):
    """A block of output or of shell commands behind a right program was taken for the program."""
    assert extract_program(completion, frozenset(["add"])) == program


def test_blocks_are_found_in_linear_time():
    """Fences without end, in a process that trains."""
    start = time.process_time()
    for text in ("`" * 300_000, "``` " * 100_000, "```\n" * 100_000, "```python " * 50_000, "~~~x\n" * 100_000):
        extract_program(text, frozenset(["add"]))
    assert time.process_time() - start < 5.0


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


@pytest.mark.parametrize(("verifier", "test"), [(Code, ASSERTS[0]), (CodeStdio, STDIO[0])])
def test_the_number_of_tests_is_bounded_before_the_run(verifier, test):
    """A sandbox of this machine would have them all in memory, and answer long after the limit."""
    with pytest.raises(ValueError, match=r"ground_truth=.* holds 10,001 tests; a program may have at most 10,000"):
        verifier.check_label([test] * 10_001)
    assert len(verifier.tests([test] * 10_000)) == 10_000


def test_an_old_connection_is_not_used_again(monkeypatch):
    """A service closes idle ones after some seconds, and a call on one that is being closed fails."""
    monkeypatch.setattr(code, "KEEP_ALIVE_S", 0.05)
    reply = json.dumps(answer([1, 1, 1, 1])[1]).encode()
    asked = []

    async def serve(reader, writer):
        asked.append(0)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
                asked[-1] += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(reply) + reply)
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            verifier = Code(Reward(code_api_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            for pause_s in (0.3, 0.0):
                assert await verifier.score(Answer(completion="x", ground_truth=ASSERTS)) == 1.0
                await asyncio.sleep(pause_s)
            await verifier.close()

    asyncio.run(run())
    assert asked == [1, 1]


@pytest.mark.parametrize("label", [[], "[]", "assert f(1", "the sum", "eJwDAAAAAAE=", math.nan, 7, [7], None])
def test_a_label_without_tests_is_no_score(label, service):
    """Nothing can pass it, so nothing is wrong."""
    service.answers = [answer([1])]
    with pytest.raises(ValueError, match="test"):
        score(Code, "x", label, Reward(code_api_url=service.url))
    assert service.asked == []


TESTED = [
    ("def test_f():\n    assert f(1) == 2", "assert f(1) == 2"),
    ("def test_f():\n    y = f(1)\n    assert y == 2\ndef test_g():\n    y = f(2)\n    assert y == 3", None),
    ("def test_f():\n    if f(1) == 2:\n        return\n    raise ValueError", None),
    ("def test_f(x=1):\n    assert f(x) == 2", None),
    ("def test_f():\n    assert f(1) == 2\ntest_f()", "def test_f():\n    assert f(1) == 2\ntest_f()"),
    ("def test_f():\n    assert f(1) == 2\nif __name__ == '__main__':\n    test_f()", "assert f(1) == 2"),
    ("from solution import f\nassert f(1) == 2", "assert f(1) == 2"),
    ("from solution import *\nassert f(1) == 2", "assert f(1) == 2"),
    ("from solution import f as g\nassert g(1) == 2", "g = f\nassert g(1) == 2"),
    ("import solution\nassert solution.f(1) == 2", "assert f(1) == 2"),
    ("import math, solution as s\nassert s.f(1) == 2", "import math\nassert f(1) == 2"),
    ("from solution import f\ndef test_f():\n    assert f(1) == 2", "assert f(1) == 2"),
    ("class TestF:\n    def test_f(self):\n        assert f(1) == 2", None),
    ("class TestF:\n    def setup_method(self):\n        self.x = 1\n    def test_f(self):\n        assert f(self.x) == 2", None),
    ("import unittest\nclass Sums(unittest.TestCase):\n    def setUp(self):\n        self.x = 1\n    def test_f(self):\n"
     "        self.assertEqual(f(self.x), 2)\nif __name__ == '__main__':\n    unittest.main()", None),
    ("from unittest import TestCase, main\nclass Sums(TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\nmain()", None),
    ("import unittest\nclass Sums(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\n"
     "suite = unittest.TestLoader().loadTestsFromTestCase(Sums)\nresult = unittest.TextTestRunner().run(suite)\n"
     "assert result.wasSuccessful()", None),
    ("class TestF:\n    @classmethod\n    def setup_class(cls):\n        cls.x = 1\n    def test_f(self):\n        assert f(self.x) == 2", None),
    ("class TestF:\n    @staticmethod\n    def test_f():\n        assert f(1) == 2", None),
    ("async def test_f():\n    assert f(1) == 2", None),
    ("import pytest\n@pytest.mark.parametrize('x, y', [(1, 2), (2, 3)])\ndef test_f(x, y):\n    assert f(x) == y",
     "for x, y in [(1, 2), (2, 3)]:\n    assert f(x) == y"),
    ("from pytest import mark, param\n@mark.parametrize('x', [param(1, id='one'), 2])\n@mark.parametrize(['z'], [(0,)], ids=['zero'])\n"
     "@mark.slow\ndef test_f(x, z, one=1):\n    assert f(x) == x + one + z", None),
    ("import pytest\nCASES = [pytest.param(1, 2, id='a')]\n@pytest.mark.parametrize(argnames='x,y', argvalues=CASES)\nclass TestF:\n"
     "    def test_f(self, x, y):\n        assert f(x) == y", None),
    ("import pytest\n@pytest.mark.skip\ndef test_f():\n    assert f(1) == 3\ndef test_g():\n    assert f(1) == 2", "assert f(1) == 2"),
    ("\ufeff    assert f(1) == 2", "assert f(1) == 2"),
    ("def param(x, y):\n    return x + y\nassert f(1) == param(1, 1)", None),
    ("from solution import TestSuite\nassert f(1) == 2", None),
    ("import unittest\ndef run_tests():\n    result = unittest.TextTestRunner().run(None)\nresult = f(1)\nassert result == 2", None),
    ("try:\n    assert f(1) == 2\nexcept AssertionError:\n    raise ValueError", None),
]  # fmt: skip


@pytest.mark.parametrize(("test", "sent"), TESTED)
def test_tests_of_pytests_form_are_run(test, sent, service):
    """Defined and never called, they were passed by every program; `solution` is the program and no file."""
    service.answers = [answer([1])]
    settings = Reward(code_api_url=service.url)
    assert Code.check_label([test]) == Code.check_label(test) == ""
    assert score(Code, "x", [test], settings) == score(Code, "x", test, settings) == 1.0
    (run,) = service.asked[0][1]["tests"]
    assert service.asked[1][1]["tests"] == [run]
    assert sent is None or run == sent
    for body, passes in (("x + 1", True), ("x - 1", False)):
        names: dict[str, object] = {"__name__": "program"}
        exec(f"def f(x): return {body}", names)
        if passes:
            exec(run, names)
        else:
            with pytest.raises((AssertionError, ValueError)):
                exec(run, names)


@pytest.mark.parametrize(
    "test",
    [
        "f(1) == 2", "", "# f(1) is 2", "pass", "x = f(1)", "print(f(1))", "all([f(1) == 2])", "assert True", "assert (f(1) == 2, 'two')",
        "assert 'f(1) == 2'", "assert 1 + 1 == 2", "import math", "def check(candidate):\n    assert candidate(1) == 2",
        "def f_is_two():\n    assert f(1) == 2", "def test_f():\n    f(1) == 2", "def test_f():\n    pass\ntest_f()",
        "def test_f(fixture):\n    assert f(fixture) == 2", "async def test_f():\n    f(1) == 2",
        "def test_f():\n    yield\n    assert f(1) == 2", "def test_f():\n    return\n    assert f(1) == 2",
        "class TestF:\n    def test_f(self):\n        f(1) == 2", "if False:\n    assert f(1) == 2", "for x in []:\n    assert f(x) == 2",
        "import pytest\n@pytest.mark.xfail\ndef test_f():\n    assert f(1) == 2",
        "import pytest\n@pytest.mark.parametrize('x', [1], indirect=True)\ndef test_f(x):\n    assert f(x) == 2",
        "import pytest\n@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.xfail)])\ndef test_f(x):\n    assert f(x) == 2",
        "try:\n    assert f(1) == 2\nexcept AssertionError:\n    print('wrong')", "try:\n    assert f(1) == 2\nexcept:\n    pass",
        "from contextlib import suppress\nwith suppress(Exception):\n    assert f(1) == 2",
        "class TestF:\n    def check(self):\n        assert f(1) == 2", "if f(1) == 2:\n    pass", "'f(1) == 2'", "lambda: f(1)",
        "if __name__ == '__main__':\n    assert f(1) == 2",
    ],
)  # fmt: skip
def test_a_test_that_checks_nothing_is_found_before_the_run(test, service):
    """Every program passes it: a free reward that nothing shows."""
    service.answers = [answer([1])]
    with pytest.raises(ValueError, match="test"):
        Code.check_label([test])
    with pytest.raises(ValueError, match="test"):
        score(Code, "x", [test], Reward(code_api_url=service.url))
    assert service.asked == []
    assert "checks nothing" in Code.check_label([test, "assert f(1) == 2"])
    assert score(Code, "x", [test, "assert f(1) == 2"], Reward(code_api_url=service.url)) == 1.0
    assert service.asked[0][1]["tests"] == ["assert f(1) == 2"]


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1) == 2", "check(f)", "f(1)", "if f(1) != 2:\n    raise ValueError", "for x in range(2):\n    assert f(x)",
        "assert False", "raise ValueError",
        "import numpy as np\nnp.testing.assert_equal(f(1), 2)", "with pytest.raises(ValueError):\n    f('x')", "exec('assert f(1)')",
        "assert eval('f(1)') == 2", "assert not f(1)", "assert x == 3", "try:\n    assert f(1)\nexcept TypeError:\n    raise",
        "try:\n    assert f(1) == 2\nexcept AssertionError:\n    print('wrong')\n    raise", "try:\n    f('x')\n    assert False\nexcept TypeError:\n    pass",
        "def check(c):\n    assert c(1) == 2\ncheck(f)", "assert Solution().f(1) == 2", "match f(1):\n    case 2:\n        raise ValueError",
    ],
)  # fmt: skip
def test_a_test_that_checks_something_is_sent_as_it_is(test, service):
    """A test that counts for nothing by mistake would be an error at the start."""
    service.answers = [answer([1])]
    assert Code.check_label([test]) == ""
    assert score(Code, "x", [test], Reward(code_api_url=service.url)) == 1.0
    assert service.asked[0][1]["tests"] == [test]


def test_a_test_that_needs_a_fixture_is_noted_before_the_run():
    """Beside another one it would be left out in silence."""
    fixture = "import pytest\n@pytest.fixture\ndef one():\n    return 1\ndef test_f(one):\n    assert f(one) == 2\n"
    assert "(fixtures), which is not called" in Code.check_label([fixture + "def test_g():\n    assert f(2) == 3"])
    helper = "def test_value(x, y):\n    assert f(x) == y\ntest_value(1, 2)"
    assert Code.check_label([helper]) == ""


def test_a_test_that_is_not_python_is_noted_before_the_run():
    """Each program would fail it."""
    assert "not Python" in Code.check_label(["assert f(1) == 2", "assert f(1 == 2"])
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(["f(1) == 2"])))).decode()
    assert Code.check_label(base64.b64encode(zlib.compress(pickle.dumps(ASSERTS))).decode()) == ""
    with pytest.raises(ValueError, match="expected a list"):
        Code.check_label(packed)
    with pytest.raises(ValueError, match="checks nothing"):
        Code.check_label(base64.b64encode(zlib.compress(pickle.dumps(["f(1) == 2"]))).decode())


def test_the_block_that_the_tests_call_is_sent(service):
    """The names come from the row's tests."""
    service.answers = [answer([1])]
    completion = fenced(ADD) + "For example\n" + fenced("print(add(1, 2))") + fenced("3", "")
    assert score(Code, completion, "assert add(1, 2) == 3", Reward(code_api_url=service.url)) == 1.0
    assert score(Code, fenced("puts 1", "ruby"), ["assert add(1, 2) == 3"], Reward(code_api_url=service.url)) == 0.0
    assert [asked[1]["program"] for asked in service.asked] == [ADD]


def test_a_program_that_cannot_be_sent_is_wrong(service):
    """Half a surrogate pair is no source of Python; an exception would leave a hostile answer without a score."""
    assert score(Code, "x = '\ud800'", ASSERTS, Reward(code_api_url=service.url)) == 0.0


def test_without_an_address_programs_run_here():
    """The quickest start: no service to set up, the same verdicts."""
    plenty = {"code_max_execution_time": 20.0}
    skip_without_namespaces()
    assert verify("code", "```python\ndef f(x): return x + 1 if x < 4 else 0\n```", ASSERTS, **plenty) == 0.75
    in_pytests_form = "from solution import f\n\ndef test_f():\n    assert f(1) == 2"
    right, wrong = fenced("def f(x): return x + 1"), fenced("def f(x): return x - 1")
    assert [verify("code", text, in_pytests_form, **plenty) for text in (right, wrong)] == [1.0, 0.0]
    assert verify("code", "\x00", ASSERTS, **plenty) == verify("code", "", ASSERTS, **plenty) == 0.0
    assert verify("code_stdio", "print(int(input()) + 1)", json.dumps(STDIO), **plenty) == 1.0
    assert math.isnan(verify("code_stdio", "print(1)", "no tests", **plenty))


def test_a_machine_that_cannot_isolate_is_refused_at_once(monkeypatch):
    """A run that starts without walls, or scores nothing for a week, is found out too late."""
    refusal = ValueError("this machine cannot isolate untrusted programs; code_sandbox_accept_risk=true accepts it")
    monkeypatch.setattr("mgrpo.sandbox.sandbox.Sandbox.start", lambda self: (_ for _ in ()).throw(refusal))
    monkeypatch.setattr("mgrpo.rewards.verifiers.code.SANDBOX_MEMORY_MB", 99)  # a sandbox of its own
    with pytest.raises(ValueError, match="code_sandbox_accept_risk=true"):
        Code(Reward())
