"""examples/coding_agent: its files and their judge, its agent and the conversations that its model has learnt go together."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mgrpo.environments.launch.command import CommandAgent
from mgrpo.environments.offered.agent import Endpoint
from tests.namespaces import skip_without_namespaces

FOLDER = Path(__file__).parents[3] / "examples" / "coding_agent"


@pytest.fixture(scope="module")
def task():
    spec = importlib.util.spec_from_file_location("coding_agent_task", FOLDER / "task.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Scripted:
    """A server of chat completions that says what it was given, in this order, and keeps the last request."""

    def __init__(self, messages: Sequence[dict[str, Any]]) -> None:
        said = self.said = list(messages)
        asked: list[tuple[str, str, dict[str, Any]]] = []
        self.asked = asked

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                asked.append((self.path, self.headers["Authorization"], json.loads(body)))
                found = {"choices": [{"message": said.pop(0)}]} if said else {"error": {"message": "over"}}
                self.send_response(200 if "choices" in found else 400)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def scripted() -> Iterator[Any]:
    made: list[Scripted] = []

    def make(said: Sequence[dict[str, Any]]) -> Scripted:
        made.append(Scripted(said))
        return made[-1]

    yield make
    for server in made:
        server.close()


def run_file(name: str, folder: Path, row: dict[str, Any], **variables: str) -> int:
    """The exit status of a program of the working folder, started as a run starts it."""
    task_file = folder / "row.json"
    task_file.write_text(json.dumps(row))
    words = [sys.executable, "-I", str(FOLDER / "files" / name)]
    known = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MGRPO_TASK": str(task_file), **variables}
    return subprocess.run(words, cwd=folder, env=known, timeout=60).returncode


def row_of(task: Any, problem: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "files": {problem.path: problem.source, "test.py": problem.test},
    }


def truth_of(task: Any, problem: Any) -> dict[str, Any]:
    return {"ground_truth": {"function": problem.name, "cases": problem.cases[task.NUM_SHOWN :]}}


def message_of(text: str) -> dict[str, Any]:
    """A turn of a conversation as the endpoint shows it."""
    text = text.removesuffix("<|im_end|>")
    if not text.startswith("<tool_call>"):
        return {"role": "assistant", "content": text}
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def test_the_test_and_the_judge_pass_a_repaired_file_alone(task, tmp_path):
    """A wrong repair would be rewarded, or a right one not."""
    rng = random.Random(3)
    kinds = set()
    while kinds != set(task.KINDS):
        problem = task.draw(rng)
        if problem.kind in kinds:
            continue
        kinds.add(problem.kind)
        (tmp_path / "test.py").write_text(problem.test)
        for source, is_right in ((problem.source, False), (problem.repaired, True)):
            (tmp_path / problem.path).write_text(source)
            assert run_file("check.py", tmp_path, truth_of(task, problem)) == (0 if is_right else 1), source
            printed = subprocess.run([sys.executable, "-B", "test.py"], cwd=tmp_path, capture_output=True, text=True)
            assert printed.stdout.strip() == task.tested(problem, source)
            assert (printed.stdout == "passed\n") == is_right


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)\n",
        "raise SystemExit(0)\n",
        "print([True] * 6)\n",
        "import os, json\nprint([v for _, v in json.load(open(os.environ['MGRPO_TASK']))['ground_truth']['cases']])\nos._exit(0)\n",
        "import json\nprint([v for _, v in json.load(open('row.json'))['ground_truth']['cases']], flush=True)\nraise SystemExit\n",
        "",
    ],
    ids=["ends", "exits", "prints", "told", "reads", "empty"],
)
def test_a_file_that_answers_for_the_judge_gets_nothing(task, tmp_path, source):
    """Models find such files before they find a repair."""
    problem = task.draw(random.Random(4))
    (tmp_path / problem.path).write_text(source)
    assert run_file("check.py", tmp_path, truth_of(task, problem)) == 1


READS_MEMORY = """
import json, os, re
parent = os.getppid()
for line in open(f"/proc/{parent}/maps"):
    first, last = (int(part, 16) for part in line.split()[0].split("-"))
    if " rw" not in line or last - first > 1 << 28:
        continue
    with open(f"/proc/{parent}/mem", "rb", 0) as memory:
        memory.seek(first)
        text = memory.read(last - first).decode("latin1")
    for place in re.finditer('"cases": ', text):
        try:
            cases, _ = json.JSONDecoder().raw_decode(text[place.end() :].lstrip())
        except ValueError:
            continue
        print(json.dumps([value for _, value in cases]), flush=True)
        os._exit(0)
"""
FORGES = """
import glob, os, time
if os.fork() == 0:
    os.setsid()
    while True:
        for home in glob.glob("/tmp/mgrpo-check-*/.mgrpo"):
            with open(f"{home}/result.json", "w") as file:
                file.write('{"reward": 1}')
        time.sleep(0.001)
time.sleep(0.3)
os._exit(0)
"""
FINDS = """
import glob, json, os
for path in glob.glob("/tmp/mgrpo-check-*/.mgrpo/*"):
    print(json.dumps([value for _, value in json.load(open(path))["ground_truth"]["cases"]]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("source", [READS_MEMORY, FORGES, FINDS], ids=["memory", "result", "task"])
def test_a_file_that_reads_or_writes_for_the_judge_within_walls_gets_nothing(task, monkeypatch, source):
    """The judge and what it judges are the same user: its memory held what is expected, and its result could be written for it."""
    skip_without_namespaces()
    monkeypatch.chdir(FOLDER / "files")
    problem = task.draw(random.Random(4))
    leaves = "import json, os; t = json.load(open(os.environ['MGRPO_TASK'])); open(t['path'], 'w').write(t['source'])"

    def judged(left: str) -> float | None:
        async def play() -> float | None:
            agent = CommandAgent(command=f'python -I -c "{leaves}"', check="python -I check.py", box="local")
            try:
                await agent.reset({"path": problem.path, "source": left}, seed=0)
                endpoint = Endpoint(base_url="http://127.0.0.1:9/s/0-1", api_key="k")
                return (await agent.run(endpoint, truth=truth_of(task, problem), limit_s=60.0)).reward
            finally:
                await agent.close()

        return asyncio.run(play())

    assert judged(source) == 0.0
    assert judged(problem.repaired) == 1.0


def test_the_agent_does_what_the_conversations_of_the_warm_up_say(task, tmp_path, scripted):
    """The model would see other answers of its tools than it has learnt with."""
    rng = random.Random(7)
    for number in range(6):
        problem = task.draw(rng)
        pieces = task.transcript(problem, rng, guessed=0.0, wrong=0.3)
        server = scripted([message_of(text) for text, is_own in pieces if is_own])
        folder = tmp_path / str(number)
        folder.mkdir()
        keys = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "a key"}
        assert run_file("agent.py", folder, row_of(task, problem), **keys) == 0
        path, key, body = server.asked[-1]
        assert (path, key, server.said) == ("/v1/chat/completions", "Bearer a key", [])
        wrote = [
            f"\n<|im_start|>user\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            for message in body["messages"]
            if message["role"] == "tool"
        ]
        assert wrote == [text for text, is_own in pieces[1:] if not is_own]


def test_calls_that_fail_are_told_to_the_model_and_a_full_context_ends_the_agent(task, tmp_path, scripted):
    """An agent that dies of them leaves no score behind, so nothing would be learnt from them."""
    problem = task.draw(random.Random(8))
    wrong = [("read", {"path": "no.py"}), ("replace", {"path": problem.path, "old": "", "new": ""}), ("fly", {})]
    said = [
        message_of(f"<tool_call>{json.dumps({'name': name, 'arguments': told})}</tool_call>") for name, told in wrong
    ]
    server = scripted(said)
    keys = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "a key"}
    assert run_file("agent.py", tmp_path, row_of(task, problem), **keys) == 0
    answers = [message["content"] for message in server.asked[-1][2]["messages"] if message["role"] == "tool"]
    assert len(server.asked) == 4
    assert [answer.split()[0] for answer in answers] == ["FileNotFoundError:", problem.path, "KeyError:"]


def test_a_shell_has_no_keys(task, tmp_path, scripted):
    """What it prints is in the trace, and the model may ask for `env`."""
    server = scripted(
        [message_of('<tool_call>{"name": "run", "arguments": {"command": "env | cut -d= -f1"}}</tool_call>')]
    )
    keys = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "a key", "SECRET": "s3cret"}
    words = row_of(task, task.draw(random.Random(9)))
    assert run_file("agent.py", tmp_path, words, **keys) == 0
    (printed,) = [message["content"] for message in server.asked[-1][2]["messages"] if message["role"] == "tool"]
    names = set(printed.split())
    assert "PYTHONDONTWRITEBYTECODE" in names and not names & set(keys)


def test_the_committed_rows_are_those_of_the_task(task):
    """Held-out files that training has seen would show too good a result."""
    train, held_out = task.split_problems()
    for name, problems in (("train", train), ("heldout", held_out)):
        rows = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
        assert [row["files"] for row in rows] == [row_of(task, problem)["files"] for problem in problems]
        assert [row["messages"][0]["content"] for row in rows] == [problem.question for problem in problems]
        truths = [json.loads(json.dumps(truth_of(task, problem)))["ground_truth"] for problem in problems]
        assert [row["ground_truth"] for row in rows] == truths
    seen = {(problem.question, problem.source) for problem in train}
    assert len(seen) == 512 and len(held_out) == 100
    assert not seen & {(problem.question, problem.source) for problem in held_out}


def test_the_committed_model_is_small_and_has_the_template_of_the_task(task):
    """Every clone downloads it."""
    files = list((FOLDER / "model").iterdir())
    assert sum(file.stat().st_size for file in files) < 2_500_000
    assert (FOLDER / "model" / "chat_template.jinja").read_text() == task.TEMPLATE
