"""The endpoint of agents: a call, calls a second and memory, beside a bare server of the same library.

The endpoint, the clients, and the learner with an engine that answers at once are processes of their own. The endpoint has one
core, everything else the others. The bare server answers the same requests with the same bytes, and reads nothing of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from mgrpo.environments.loop.program_language import LanguageSpec
from mgrpo.environments.workers.link import Link
from mgrpo.processes.json_lines import Child
from tools.bench_cases.tokenizer import train_tokenizer
from tools.bench_cases.watch import cpu_s

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 5
PACKAGES = ("mgrpo", "uvicorn", "h11", "tokenizers", "transformers")
TURNS, OBSERVATION = 4, "y = 3.14159 * radius ** 2\n" * 8
PROTOCOL = (
    f"agents of {TURNS} turns with two tools, about 700 tokens before the first turn, {len(OBSERVATION)} characters "
    "after each; {alone} one after the other, and {sessions} at once; the bare server and the endpoint take turns, "
    "medians of {repeats} after a first; the learner's engine answers at once, with the figures of memory after {engine_s:g} s"
)
TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\nYou may call:\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' + m.role + '\n' + m.content }}
    {%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
SAID = 'I look at the file.\n<tool_call>\n{"name": "bash", "arguments": {"command": "sed -n 1,40p src/shapes.py"}}\n</tool_call>'
BASH, EDIT = "Runs a command in a shell and shows its output. ", "Replaces a text in a file by another one. "
FUNCTIONS = (("bash", BASH, ["command"]), ("edit", EDIT, ["path", "old", "new"]))
TOOLS: list[dict[str, Any]] = []
for name, what, fields in FUNCTIONS:
    properties = {field: {"type": "string", "description": what} for field in fields}
    parameters = {"type": "object", "properties": properties, "required": fields}
    TOOLS.append({"type": "function", "function": {"name": name, "description": what * 6, "parameters": parameters}})
SYSTEM = "You repair programs. Look at the files, change what is wrong and run the tests. " * 12
TIMEOUT_S = 600.0
SPAWN = get_context("spawn")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=256, help="open at once, for the calls a second")
    parser.add_argument("--alone", type=int, default=50, help="sessions one after the other, for the cost of a call")
    parser.add_argument("--open", type=int, default=1000, help="open at once, for the memory")
    parser.add_argument("--engine_s", type=float, default=1.0, help="seconds of a turn meanwhile")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return asyncio.run(measure_servers(args))


def make_tokenizer(folder: Path) -> LanguageSpec:
    """A byte-level BPE of this repository's own text, with words as real ones have them."""
    files = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("mgrpo/**/*.py"))]
    tokenizer = train_tokenizer(folder, (file.read_text() for file in files), vocab_size=16_000)
    return LanguageSpec(
        tokenizer=str(folder),
        template=TEMPLATE,
        template_kwargs={},
        format="hermes",
        stop_ids=tokenizer.convert_tokens_to_ids(["<|im_end|>"]),
        add_bos=False,
        max_observation_tokens=4000,
    )


class Learner:
    """The endpoint's other side, with an engine that says the same at once, or after `delay_s`."""

    def __init__(self, said: Sequence[int]) -> None:
        self.delay_s = 0.0
        self.engine_s: list[float] = []
        """Seconds of each turn, from its wish to its answer."""
        tokens = {"tokens": list(said), "logprobs": [-0.25] * len(said)}
        self._answer = {"ask": "sampled", "finish_reason": "stop", **tokens}

    async def start(self, spec: LanguageSpec, cores: set[int]) -> None:
        self._link = Link(Child("mgrpo.environments.endpoint.process", max_line_bytes=1 << 28), lambda why: None)
        os.sched_setaffinity(self._link.pid, cores)
        self.process = psutil.Process(self._link.pid)
        limits = {"max_turns": 1024, "max_open_calls": 64, "max_branches": 1024, "body_bytes": 1 << 24, "body_s": 10.0}
        where = {"host": "127.0.0.1", "port": 0, "public_url": None, "number": 0}
        await self.ask("load", language=spec.to_json(), limits=limits, worker_key=None, **where)
        self._serving = asyncio.create_task(self._serve())

    async def ask(self, name: str, **fields: Any) -> dict[str, Any]:
        answer = await self._link.ask({"ask": name, **fields}, TIMEOUT_S)
        assert "error" not in answer, answer
        return answer

    async def open(self) -> dict[str, Any]:
        return await self.ask("open", max_tokens=1 << 20, max_model_length=1 << 20, sampling={"temperature": 1.0})

    async def _serve(self) -> None:
        tasks = set()
        while True:
            for wish in (await self._link.ask({"ask": "wishes"}, 1e6))["wishes"]:
                task = asyncio.create_task(self._sample(wish, time.perf_counter()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _sample(self, wish: Mapping[str, Any], began: float) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        self.engine_s.append(time.perf_counter() - began)
        await self._link.ask({**self._answer, "session": wish["session"], "number": wish["number"]}, TIMEOUT_S)

    def end(self) -> None:
        self._serving.cancel()
        self._link.end()


async def agent(session: Mapping[str, str], number: int, turns: int, times: list[float]) -> None:
    """One agent that calls a tool in each turn, over one connection; answers are read and added as clients do."""
    host, port = session["base_url"].split("/")[2].split(":")
    path = session["base_url"].split(port, 1)[1]
    head = (
        f"POST {path}/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {session['api_key']}\r\nContent-Length: "
    )
    reader, writer = await asyncio.open_connection(host, int(port))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Task {number}: the areas of src/shapes.py are wrong."},
    ]
    for _ in range(turns):
        began = time.perf_counter()
        body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS}).encode()
        writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        message = json.loads(await reader.readexactly(length))["choices"][0]["message"]
        times.append(time.perf_counter() - began)
        messages.append(message)
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": OBSERVATION})
    writer.close()


def run_agents(sessions: Sequence[Mapping[str, str]], turns: int, at_once: bool) -> dict[str, Any]:
    """Run all agents at once, or one after the other; in a process of their own."""
    times: list[float] = []
    runs = [partial(agent, session, number, turns, times) for number, session in enumerate(sessions)]

    async def run() -> None:
        if at_once:
            await asyncio.gather(*(each() for each in runs))
        else:
            for each in runs:
                await each()

    began = time.perf_counter()
    asyncio.run(run())
    return {"times": times, "seconds": time.perf_counter() - began}


def bare_main(answer: str) -> None:
    """A server that reads a body as far as HTTP must, and answers with these bytes."""
    import uvicorn

    from mgrpo.sandbox.connection import BoundedConnection, listen

    data = answer.encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    listening = listen("127.0.0.1", 0)
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(app, http=BoundedConnection, ws="none", lifespan="off", log_level="error", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


@contextmanager
def bare_server(cores: set[int]) -> Iterator[tuple[psutil.Process, list[dict[str, str]]]]:
    """The process of the bare server, and an address of it as a session."""
    function = {"name": "bash", "arguments": '{"command": "sed -n 1,40p src/shapes.py"}'}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    message = {"role": "assistant", "content": "I look at the file.", "tool_calls": calls, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    usage = {"prompt_tokens": 500, "completion_tokens": 40, "total_tokens": 540}
    head = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": "policy"}
    answer = json.dumps({**head, "choices": [choice], "usage": usage})
    program = f"import sys; from {__name__} import bare_main; bare_main(sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", program, answer], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout
    port = process.stdout.readline().strip()
    os.sched_setaffinity(process.pid, cores)
    try:
        yield (
            psutil.Process(process.pid),
            [{"base_url": f"http://127.0.0.1:{port}/s/0-0123456789abcdef", "api_key": "k" * 32}],
        )
    finally:
        process.kill()
        process.wait()


def row(server: str, sessions: int, found: Mapping[str, Any], cpu: float, engine_s: Sequence[float]) -> dict[str, Any]:
    times = sorted(found["times"])
    return {
        "server": server,
        "sessions": sessions,
        "calls": len(times),
        "calls_per_s": len(times) / found["seconds"],
        "cpu_ms_per_call": 1000 * cpu / len(times),
        "latency_ms_median": 1000 * statistics.median(times),
        "latency_ms_p99": 1000 * times[int(0.99 * (len(times) - 1))],
        "engine_ms_mean": 1000 * statistics.mean(engine_s) if engine_s else 0.0,
    }


async def measure_servers(args: argparse.Namespace) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    own, others = {cores[0]}, set(cores[1:]) or {cores[0]}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mgrpo-bench-") as folder, ProcessPoolExecutor(1, SPAWN) as agents:
        spec = make_tokenizer(Path(folder))
        os.sched_setaffinity(0, others)
        said = spec.make().tokenizer(f"{SAID}<|im_end|>", add_special_tokens=False)["input_ids"]
        async with learning(said, spec, own) as learner:
            with bare_server(own) as (bare, address):
                for sessions in [1, args.sessions] * (args.repeats + 1):
                    num = args.alone if sessions == 1 else sessions
                    cpu = cpu_s(bare)
                    found = await asyncio.wrap_future(agents.submit(run_agents, address * num, TURNS, sessions > 1))
                    rows.append(row("bare", sessions, found, cpu_s(bare) - cpu, ()))
                    opened = [await learner.open() for _ in range(num)]
                    learner.engine_s.clear()
                    cpu = cpu_s(learner.process)
                    found = await asyncio.wrap_future(agents.submit(run_agents, opened, TURNS, sessions > 1))
                    rows.append(row("endpoint", sessions, found, cpu_s(learner.process) - cpu, learner.engine_s))
                    for session in opened:
                        await learner.ask("end", session=session["session"])
        memory = []
        for turns in (TURNS, 20):
            async with learning(said, spec, own) as learner:
                memory.append(await measure_memory(learner, agents, args.open, turns, args.engine_s))
    return {"rows": summaries(rows[4:], args.sessions), "memory": memory}


@asynccontextmanager
async def learning(said: Sequence[int], spec: LanguageSpec, cores: set[int]) -> AsyncIterator[Learner]:
    """A learner with an endpoint on these cores."""
    learner = Learner(said)
    await learner.start(spec, cores)
    try:
        yield learner
    finally:
        learner.end()


async def measure_memory(
    learner: Learner, agents: ProcessPoolExecutor, num: int, turns: int, engine_s: float
) -> dict[str, Any]:
    before = learner.process.memory_full_info()
    opened = [await learner.open() for _ in range(num)]
    learner.delay_s = engine_s
    found = await asyncio.wrap_future(agents.submit(run_agents, opened, turns, True))
    after = learner.process.memory_full_info()
    times = sorted(1000 * (each - learner.delay_s) for each in found["times"])
    return {
        "sessions": num,
        "turns": turns,
        "memory_mb_before": before.rss / 1e6,
        "memory_mb": after.rss / 1e6,
        "kb_per_session": (after.rss - before.rss) / 1e3 / num,
        "seconds": found["seconds"],
        "least_seconds": turns * learner.delay_s,
        "over_engine_ms_median": statistics.median(times),
        "over_engine_ms_p99": times[int(0.99 * (len(times) - 1))],
        "connections": len(opened),
    }


def summaries(rows: Sequence[Mapping[str, Any]], sessions: int) -> list[dict[str, Any]]:
    """The median of each figure over the repeats."""
    found = []
    for server in ("bare", "endpoint"):
        for num in (1, sessions):
            own = [each for each in rows if (each["server"], each["sessions"]) == (server, num)]
            numbers = {
                name: statistics.median(each[name] for each in own)
                for name in own[0]
                if name not in ("server", "sessions", "calls")
            }
            found.append({"server": server, "sessions": num, "calls": own[0]["calls"], "repeats": len(own), **numbers})
    return found
