"""Requests of the code service, from bytes to a program and its tests.

Unpacking a hostile one takes seconds, in which a thread would hold the interpreter: the service has processes for it.
"""

from __future__ import annotations

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from mgrpo.processes.lifetime import die_with_parent
from mgrpo.sandbox.cases import MAX_TESTS, StdioTest, assert_tests, stdio_tests

_LONGEST_LIMIT_S = 300.0
_NUM_READERS = 2
_READER_BYTES = 4 * 2**30


class TestRequest(BaseModel):
    program: str
    tests: Any
    """A list, its JSON text, or Open Instruct's compressed form."""
    max_execution_time: float = Field(default=1.0, gt=0, le=_LONGEST_LIMIT_S, allow_inf_nan=False)


class CodeRequest(BaseModel):
    code: str
    timeout: float = Field(default=5.0, gt=0, le=_LONGEST_LIMIT_S, allow_inf_nan=False)
    session: str | None = Field(default=None, min_length=1, max_length=100)
    """Calls of one session share their names; without one, the code runs in a fresh interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    program: str
    tests: list[str] | list[StdioTest]
    limit_s: float

    @property
    def num_bytes(self) -> int:
        """Length of its texts, in characters: about its size in memory."""
        texts = [test if isinstance(test, str) else test.input + test.output for test in self.tests]
        return len(self.program) + sum(map(len, texts))


def read_question(body: bytes, *, is_stdio: bool) -> Question:
    """ValueError with the reason where it is not a request that the service can run."""
    try:
        request = TestRequest.model_validate_json(body)
        tests = stdio_tests(request.tests) if is_stdio else assert_tests(request.tests)
    except ValidationError as err:
        raise ValueError(_problems(err)) from None
    except (MemoryError, RecursionError) as err:
        raise ValueError(f"the tests cannot be unpacked ({type(err).__name__})") from None
    if len(tests) > MAX_TESTS:
        raise ValueError(f"{len(tests)} tests; a request may have at most {MAX_TESTS}")
    return Question(program=request.program, tests=tests, limit_s=request.max_execution_time)


def read_code(body: bytes) -> CodeRequest:
    """ValueError with the reason where it is not a request that the service can run."""
    try:
        return CodeRequest.model_validate_json(body)
    except ValidationError as err:
        raise ValueError(_problems(err)) from None


def _problems(err: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, error['loc'])) or 'the request'}: {error['msg']}" for error in err.errors())


def reading_processes() -> ProcessPoolExecutor:
    """Processes for `read_question`, which end with this one."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(_NUM_READERS, mp_context=spawn, initializer=_bound_reader)


def _bound_reader() -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_READER_BYTES, _READER_BYTES))
