"""Programs judged by tests: `code` (assert statements), `code_stdio` (inputs and outputs).

The service that `code_api_url` or CODE_API_URL names runs them, otherwise a sandbox of this machine.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, ClassVar, TypeGuard
from urllib.parse import urlsplit

from mgrpo.config.schema import Reward
from mgrpo.processes.reply_bodies import KEEP_ALIVE_S, PLAIN, plain_body
from mgrpo.rewards.verifier import Answer, RemoteVerifier, after_thinking, shown
from mgrpo.rewards.verifiers.answers.asserts import read_test
from mgrpo.rewards.verifiers.answers.programs import extract_program, has_block
from mgrpo.sandbox.cases import MAX_TESTS, assert_tests, stdio_tests
from mgrpo.sandbox.local import borrow_sandbox, give_back_sandbox
from mgrpo.sandbox.sandbox import Sandbox, Verdicts, client_limit_s
from mgrpo.sandbox.walled import SandboxError

if TYPE_CHECKING:
    import aiohttp

    from mgrpo.sandbox.isolation import Isolation

SANDBOX_MEMORY_MB = 1024
"""Memory of a program in the sandbox of this machine."""
_SPACE = re.compile(r"\s")
_COMPRESSED = re.compile(r"\s*[A-Za-z0-9+/]+=*\s*")
# A compressed label of more characters may take a second to read; one of a hundred tests takes a millisecond.
_LONGEST_LOOKED_AT = 2**14
_MOST_LOOKED_AT = 100
_CONNECTIONS = 100
_CONNECT_S = 10.0
# A test's result and runtime in a reply, with white space; and the other contents of one.
_VERDICT_BYTES = 128
_REPLY_BYTES = 2**16
_PAUSES_S = (0.3, 0.6, 1.2)
_PASSING_TROUBLE = (500, 502, 503, 504)


class Code(RemoteVerifier):
    """Share of the assert statements that hold after the program; the label is their list, or its JSON text."""

    name: ClassVar[str] = "code"
    path: ClassVar[str] = "/test_program"

    @classmethod
    def problems(cls, settings: Reward) -> list[str]:
        try:
            if _service(settings) is not None:
                return []
        except ValueError as err:
            return [str(err)]
        try:
            _isolation().refuse_if_missing(accept_risk=settings.code_sandbox_accept_risk)
        except (ValueError, RuntimeError) as err:
            return [f"{cls.name}: {err}"]
        return []

    @classmethod
    def notes(cls, settings: Reward) -> list[str]:
        base_url = _service(settings)
        where = f"at {base_url}" if base_url else f"in a sandbox of this machine: {_isolation().describe()}"
        return [f"programs run {where}"]

    def __init__(self, settings: Reward) -> None:
        """ValueError where the service has no address, or none is named and this machine cannot isolate programs."""
        super().__init__(settings)
        self._base_url = _service(settings)
        self._sandbox: Sandbox | None = None
        if self._base_url is None:
            self._sandbox = borrow_sandbox(SANDBOX_MEMORY_MB, accept_risk=settings.code_sandbox_accept_risk)
        self._client: aiohttp.ClientSession | None = None
        self._connections = asyncio.Semaphore(_CONNECTIONS)
        self._judged = {"tests": 0.0, "tests_in_process": 0.0}

    async def score(self, answer: Answer) -> float:
        tests = self.tests(answer.ground_truth)
        program = self._program(answer)
        if not program.strip() or not _is_source(program):
            return 0.0
        limit_s = self.settings.code_max_execution_time
        verdicts = await self._ask(program, tests, limit_s)
        passed, runtimes = _read(verdicts, len(tests), limit_s)
        self._judged["tests"] += len(tests)
        self._judged["tests_in_process"] += _num_in_process(verdicts)
        if sum(passed) / len(passed) < self.settings.code_pass_rate_reward_threshold:
            return 0.0
        if self.settings.code_apply_perf_penalty:
            passed = [ok * max(limit_s - runtime, 0) / limit_s for ok, runtime in zip(passed, runtimes, strict=True)]
        return sum(passed) / len(passed)

    @classmethod
    def tests(cls, label: object) -> list:
        """The tests as the service takes them; ValueError for a label that it does not take, or that holds none."""
        tests = cls._tests(label)
        if not tests:
            raise ValueError(f"ground_truth={shown(label)} holds no test; a program can neither pass nor fail")
        if len(tests) > MAX_TESTS:
            raise ValueError(
                f"ground_truth={shown(label)} holds {len(tests):,} tests; a program may have at most {MAX_TESTS:,}"
            )
        return tests

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        if _is_compressed(ground_truth) and len(ground_truth) > _LONGEST_LOOKED_AT:
            return ""
        cls.tests(ground_truth)
        return cls._left_out(ground_truth)

    @classmethod
    def _left_out(cls, label: object) -> str:
        tests = [read_test(test) for test in _asserts(label)[:_MOST_LOOKED_AT]]
        if not all(test.checks for test in tests):
            return "hold a test that checks nothing, which is left out"
        if not all(test.is_python for test in tests):
            return "hold a test that is not Python, which no program passes"
        return "hold a test function with arguments of pytest's (fixtures), which is not called" * any(
            test.has_uncalled for test in tests
        )

    @classmethod
    def _tests(cls, label: object) -> list:
        tests = [read_test(test) for test in _asserts(label)]
        checking = [test.source for test in tests if test.checks]
        if tests and not checking:
            raise ValueError(
                f"ground_truth={shown(label)} checks nothing: every program would pass; expected assert statements about "
                "names of the program (imported from `solution`, or not at all), or functions test_... without fixtures that hold some; "
                "call other functions that hold them (check(add))"
            )
        return checking

    def _program(self, answer: Answer) -> str:
        called = [read_test(test).called for test in _asserts(answer.ground_truth)]
        return program_of(answer.completion, frozenset().union(*called))

    def metrics(self) -> dict[str, float]:
        """The number of tests run, and of those that the program's own process has decided."""
        return dict(self._judged)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._sandbox is not None:
            # Not in another thread: none can be started while the interpreter ends.
            settings = self.settings
            give_back_sandbox(SANDBOX_MEMORY_MB, accept_risk=settings.code_sandbox_accept_risk)

    async def _ask(self, program: str, tests: list, limit_s: float) -> object:
        """The verdicts. A request to a busy or broken service is retried, one that is refused or takes too long is not."""
        import aiohttp

        question = {"program": program, "tests": tests, "max_execution_time": limit_s}
        for pause_s in (*_PAUSES_S, None):
            try:
                if self._sandbox is not None:
                    # No limit: the programs are bounded, and so is the wait for them.
                    return (await asyncio.wrap_future(self._run(self._sandbox, program, tests, limit_s)))._asdict()
                status, text = await self._post(question, _REPLY_BYTES + len(tests) * _VERDICT_BYTES)
            except (aiohttp.ClientError, SandboxError):
                if pause_s is None:
                    raise
            else:
                if 200 <= status < 300:
                    return json.loads(text)
                if pause_s is None or status not in _PASSING_TROUBLE:
                    raise RuntimeError(f"{self._base_url}{self.path} answered {status}: {text[:300]}")
            await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    @staticmethod
    def _run(sandbox: Sandbox, program: str, tests: list, limit_s: float) -> Future[Verdicts]:
        return sandbox.run_asserts(program, tests, limit_s)

    async def _post(self, question: dict, most_bytes: int) -> tuple[int, str]:
        """Status and text of the reply; TimeoutError, and ValueError for one that is compressed or longer than `most_bytes`."""
        import aiohttp

        if self._client is None:
            timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S)
            connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S)
            self._client = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        # An exchange has a limit as a whole: one for each read would let a service drip.
        limit = asyncio.timeout(client_limit_s(self.settings.code_max_execution_time))
        url = f"{self._base_url}{self.path}"
        async with (
            self._connections,
            limit,
            self._client.post(url, json=question, headers=PLAIN, allow_redirects=False) as response,
        ):
            try:
                body = await plain_body(response.headers, response.content.iter_any(), most_bytes)
            except ValueError as err:
                raise ValueError(f"{url}: {err}") from None
        return response.status, body.decode("utf-8", "replace")


class CodeStdio(Code):
    """Share of the inputs for which the program prints the output; the label is a list of {"input", "output"}."""

    name: ClassVar[str] = "code_stdio"
    path: ClassVar[str] = "/test_program_stdio"

    @classmethod
    def _left_out(cls, label: object) -> str:
        return ""

    @classmethod
    def _tests(cls, label: object) -> list:
        return [asdict(test) for test in stdio_tests(label)]

    def _program(self, answer: Answer) -> str:
        return program_of(answer.completion)

    @staticmethod
    def _run(sandbox: Sandbox, program: str, tests: list, limit_s: float) -> Future[Verdicts]:
        return sandbox.run_stdio(program, stdio_tests(tests), limit_s)


def program_of(completion: str, called: frozenset[str] = frozenset()) -> str:
    """The program of the answer, or of the thoughts where the answer holds no block; "" without one.

    Args:
        called: the names that tests expect of the program, which decide between several blocks.
    """
    answer = after_thinking(completion)
    return extract_program(completion if answer and not has_block(answer) and has_block(completion) else answer, called)


def _asserts(label: object) -> list[str]:
    """The tests of a label as it holds them; source text that is not a list is one test."""
    if isinstance(label, str) and label.strip() and label.lstrip()[0] not in "[{" and not _is_compressed(label):
        if not read_test(label).is_python:
            raise ValueError(f"ground_truth={shown(label)} is neither a test in Python nor a list of tests")
        return [label]
    return assert_tests(label)


def _is_compressed(label: object) -> TypeGuard[str]:
    return isinstance(label, str) and _COMPRESSED.fullmatch(label) is not None


def _service(settings: Reward) -> str | None:
    """The service that the settings or the environment name; ValueError where it is not an address."""
    url, source = settings.code_api_url, "code_api_url"
    if not url:
        url, source = os.environ.get("CODE_API_URL", "").strip(), "CODE_API_URL in the environment"
    if url and not _is_address(url.strip()):
        raise ValueError(f"{source}={url!r} is not an address; expected for example http://localhost:1234/test_program")
    return service_url(url.strip())


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not _SPACE.search(url)
    except ValueError:
        return False


@functools.cache
def _isolation() -> Isolation:
    """Determined once per process, since it takes running a program that tries to get through."""
    with Sandbox(num_slots=1, accept_risk=True) as sandbox:
        return sandbox.start()


def service_url(url: str | None) -> str | None:
    """The address that the paths are appended to; `url` may already end with one of them."""
    if not url:
        return None
    base = url.rstrip("/")
    for path in (CodeStdio.path, Code.path):
        base = base.removesuffix(path)
    return base


def _is_source(program: str) -> bool:
    """True if it can be sent at all; Python reads no source with a lone surrogate."""
    try:
        program.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(verdicts: object, num_tests: int, limit_s: float) -> tuple[Sequence[float], Sequence[float]]:
    """Results and runtimes; ValueError where they are not one for each test, or not possible results of a service."""
    if isinstance(verdicts, dict):
        passes, runtimes = verdicts.get("results"), verdicts.get("runtimes")
        if isinstance(passes, list) and isinstance(runtimes, list) and len(passes) == len(runtimes) == num_tests:
            for index, (passed, runtime) in enumerate(zip(passes, runtimes, strict=True)):
                _check(index, passed, runtime, limit_s)
            return passes, runtimes
    raise ValueError(f"the code service answered {shown(verdicts)} to {num_tests} tests")


def _check(index: int, passed: object, runtime: object, limit_s: float) -> None:
    """A test that did not pass may have the runtime -1. Services round the limit of a stdio test up to whole seconds."""
    most_s = math.ceil(limit_s)
    is_measured = isinstance(runtime, int | float) and 0 <= runtime <= most_s
    if passed not in (0, 1) or not (is_measured or (runtime == -1 and not passed)):
        raise ValueError(
            f"the code service answered result {shown(passed)} and runtime {shown(runtime)} for test {index}; expected "
            f"0 or 1, and 0 to {most_s} s (-1 for a test that did not pass)"
        )


def _num_in_process(verdicts: object) -> int:
    """Tests that the program's own process has decided; 0 where the service does not report them."""
    told = verdicts.get("in_process") if isinstance(verdicts, dict) else None
    return told.count(1) if isinstance(told, list) else 0
