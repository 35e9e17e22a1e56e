"""Tasksets of the library `verifiers` play against the endpoint, in a worker whose interpreter has that library.

The library wants packages that a trainer must not have, so that its interpreter is named: MGRPO_TEST_VERIFIERS_V1_PYTHON. `uv`
is beside it, which prepares the library's harnesses.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.workers.environment_catalog import AGENT, Spec
from mgrpo.environments.workers.pool import EnvironmentPool, describe
from tests.unit.environments.endpoint.served import Served

MODULES = str(Path(__file__).with_name("verifiers_modules"))
PYTHON = os.environ.get("MGRPO_TEST_VERIFIERS_V1_PYTHON", "")
LIMIT_S = 200.0

needs_library = pytest.mark.skipif(
    not PYTHON, reason="MGRPO_TEST_VERIFIERS_V1_PYTHON names no interpreter with verifiers from 0.4 on"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("tokenizer"))
    yield made
    made.close()


def played(served: Served, monkeypatch: pytest.MonkeyPatch, row: Mapping[str, Any], **settings: Any) -> tuple[Any, Any]:
    """How the agent has ended, and the endpoint's report."""
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}:{os.environ['PATH']}")
    session = served.open()
    spec = Spec(entry=f"{AGENT}verifiers", settings=settings)

    async def play() -> Any:
        pool = EnvironmentPool(
            [spec],
            pool_size=1,
            num_workers=1,
            limits=WorkerLimits(reset_timeout_s=60),
            folders=[MODULES],
            python=PYTHON,
            # Where an index is behind a proxy, uv needs to know.
            variables=[name for name in os.environ if name.startswith(("SSL_", "UV_"))],
        )
        try:
            await pool.start()
            instance = await pool.acquire(row, seed=0, trajectory="0/0")
            endpoint = {name: session[name] for name in ("base_url", "api_key", "reward_key")}
            return await instance.run_agent(endpoint, truth={}, limit_s=LIMIT_S)
        finally:
            await pool.close()

    return asyncio.run(play()), served.end(session)


@needs_library
@pytest.mark.parametrize("harness", ["null", "bash"])
def test_a_taskset_plays_with_a_harness_of_the_library(
    served: Served, monkeypatch: pytest.MonkeyPatch, harness: str
) -> None:
    """Its rubric rewards, and every turn is recorded."""
    outcome, report = played(served, monkeypatch, {"example_id": 2}, taskset="mgrpo_test_counting", harness=harness)
    assert outcome["ended"] == "ended", outcome["output"]
    assert all(turn["delivered"] for turn in report["turns"])
    # What bash makes of a tool that it does not have may be a conversation of its own.
    assert len(report["roots"]) == 1 or harness == "bash"
    right = "done 2 " in report["turns"][-1]["message"]["content"]
    assert outcome["reward"] == float(right)
    assert outcome["metrics"]["play/turns"] == len(report["turns"]) >= 1


@needs_library
def test_an_error_of_the_library_is_a_crash_with_its_words(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, _ = played(served, monkeypatch, {"example_id": 9}, taskset="mgrpo_test_counting", harness="null")
    assert outcome["ended"] == "crashed" and outcome["reward"] is None
    assert "example_id=9 is beyond the taskset's 3 tasks" in outcome["output"]


class _Gym(BaseHTTPRequestHandler):
    """A resource server of NeMo Gym with a tool, as its library asks it."""

    protocol_version = "HTTP/1.1"
    verified: ClassVar[list[Any]] = []

    def log_message(self, *words: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/verify":
            self.verified.append(body)
            answer: Any = {**body, "reward": 0.5, "is_right": True}
        else:
            answer = {} if self.path == "/seed_session" else int(body["x"]) + 1
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@needs_library
def test_nemo_gym_tasks_play_with_their_tools(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The taskset comes with the library: its tools answer, and its server verifies."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gym)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}, "why": {"type": "string"}}}
    tool = {"type": "function", "name": "add", "description": "Adds one.", "parameters": parameters, "strict": False}
    asked = {"input": [{"role": "user", "content": "count to 2"}], "tools": [tool]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"responses_create_params": asked}) + "\n")
    try:
        outcome, report = played(
            served,
            monkeypatch,
            {"example_id": 0},
            taskset="nemo_gym",
            args={
                "dataset": str(tmp_path / "rows.jsonl"),
                "task": {"resources_url": f"http://127.0.0.1:{server.server_port}"},
            },
            harness="null",
        )
    finally:
        server.shutdown()
    assert outcome["ended"] == "ended", outcome["output"]
    assert (outcome["reward"], outcome["metrics"]["play/is_right"]) == (0.5, 1.0)
    assert len(_Gym.verified) == 1 and len(report["roots"]) == 1
    assert [turn["calls"] for turn in report["turns"]] == [["add"], ["add"], []]


def test_a_missing_library_is_refused_at_the_start_with_its_remedy() -> None:
    if sys.executable == PYTHON:
        pytest.skip("the library is here")
    refusal = "verifiers is not installed for the interpreter of the environments; pip install 'verifiers>=0.4' into an"
    with pytest.raises(ValueError, match=re.escape(refusal)):
        describe([Spec(entry=f"{AGENT}verifiers", settings={"taskset": "any"})])


@pytest.mark.parametrize(("version", "is_too_old"), [("0.1.14.post1", True), ("0.3.9", True), ("0.4.0", False)])
def test_a_library_that_is_too_old_is_refused_at_the_start(tmp_path: Path, version: str, is_too_old: bool) -> None:
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers/__init__.py").write_text("raise AssertionError('the version is known without an import')")
    (tmp_path / f"verifiers-{version}.dist-info").mkdir()
    (tmp_path / f"verifiers-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n"
    )
    spec = Spec(entry=f"{AGENT}verifiers", settings={"taskset": "any"})
    if not is_too_old:
        assert [offer.name for offer in describe([spec], folders=[str(tmp_path)]).offers] == ["play"]
        return
    refusal = f"verifiers {version} is installed for the interpreter of the environments, and 0.4 or later is needed; pip install"
    with pytest.raises(ValueError, match=re.escape(refusal)):
        describe([spec], folders=[str(tmp_path)])
