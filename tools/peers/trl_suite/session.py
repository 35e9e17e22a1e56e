"""A plugin of pytest: each test in a process of its own, in a limit of time, with an outcome that is kept on disk at once."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import signal
import textwrap
import time
from pathlib import Path
from typing import Any, Literal, NoReturn, TypedDict

import pytest
from _pytest.runner import runtestprotocol
from _pytest.skipping import evaluate_skip_marks

from tools.peers.trl_suite.meaning import why_not

NOTE = 300
"""Characters that are kept of an error."""
GRACE_S = 10.0
"""How long a test that is stopped has to end its processes."""


class Outcome(TypedDict):
    outcome: Literal["passed", "failed", "skipped", "not meaningful"]
    note: str
    """Beginning of the error, or the reason."""
    seconds: float


class Session:
    def __init__(self, folder: Path, *, limit_s: float) -> None:
        """
        Args:
            folder: for logs/ and results.json, in which the outcomes of tests that do not run again are kept.
        """
        self.results = folder / "results.json"
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.limit_s = limit_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        name = item.nodeid.partition("::")[2]
        result = known(item) or self._run(item, name)
        self.results.write_text(json.dumps(kept(self.results) | {name: result}, indent=1) + "\n")
        print(f"{result['outcome']:14} {result['seconds']:5.1f} s  {name}  {result['note']}", flush=True)
        return True

    def _run(self, item: pytest.Item, name: str) -> Outcome:
        """Run a test in a fork, in which all modules are loaded already."""
        log = self.logs / (re.sub(r"\W+", "_", name) + ".log")
        answer = log.with_suffix(".json")
        answer.unlink(missing_ok=True)
        start = time.monotonic()
        child = os.fork()
        if not child:
            _in_fork(item, log, answer)
        try:
            in_time = _ended(child, self.limit_s)
            if not in_time:
                os.killpg(child, signal.SIGTERM)
                _ended(child, GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        seconds = round(time.monotonic() - start, 1)
        if not in_time:
            return {"outcome": "failed", "note": f"not done after {self.limit_s:g} s", "seconds": seconds}
        if not answer.exists():
            return {"outcome": "failed", "note": "its process ended without a word", "seconds": seconds}
        return {**json.loads(answer.read_text()), "seconds": seconds}


def kept(results: Path) -> dict[str, Outcome]:
    """The outcomes so far, by the names of the tests."""
    return json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}


def known(item: Any) -> Outcome | None:
    """The outcome of a test that need not run."""
    if skip := evaluate_skip_marks(item):
        return {"outcome": "skipped", "note": skip.reason, "seconds": 0.0}
    if reason := why_not(inspect.getsource(item.function), class_name=item.cls.__name__):
        return {"outcome": "not meaningful", "note": reason, "seconds": 0.0}
    return None


def summed_up(reports: list[Any]) -> dict[str, str]:
    """Outcome and note of a test, from pytest's reports of its setup, call and teardown."""
    for report in reports:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else report.longreprtext
            return {"outcome": "failed", "note": textwrap.shorten(message, NOTE, placeholder=" ...")}
        if report.skipped:
            return {"outcome": "skipped", "note": report.longrepr[2]}
    return {"outcome": "passed", "note": ""}


def _in_fork(item: pytest.Item, log: Path, answer: Path) -> NoReturn:
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        reports = runtestprotocol(item, log=False, nextitem=None)
        for report in reports:
            print(report.longreprtext, flush=True)
        answer.write_text(json.dumps(summed_up(reports)))
    finally:
        os._exit(0)


def _ended(child: int, limit_s: float) -> bool:
    """Whether a process ends in time; if so it is reaped."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return True
        time.sleep(0.05)
    return False
