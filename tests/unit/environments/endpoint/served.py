"""An endpoint in a process of its own, and the learner's side of it: a scripted engine, which spells as no tokenizer does."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.environments.agents.recorded_tree import RecordedTree
from mgrpo.environments.loop.program_language import LanguageSpec
from mgrpo.environments.loop.trajectory import Sampled
from mgrpo.environments.workers.link import Link
from mgrpo.processes.json_lines import Child
from tests.unit.environments.chat_templates import JOINED, changed, make_tokenizer

TEMPLATE = changed(
    JOINED,
    r"""'\n<call>' + call.function.name + (call.function.arguments | tojson) + '</call>'""",
    r"""'\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>'""",
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds one.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "why": {"type": "string"}},
            "required": ["x"],
        },
    },
}
ASKED = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "count to 4"}]
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": None, "min_p": None}
WAIT_S = 60.0


def language_of(folder: Path, tokenizer: Any) -> LanguageSpec:
    """The language of `TEMPLATE` with this tokenizer, which is saved in the folder."""
    tokenizer.save_pretrained(folder)
    return LanguageSpec(
        tokenizer=str(folder),
        template=TEMPLATE,
        template_kwargs={},
        format="hermes",
        stop_ids=tokenizer.convert_tokens_to_ids(["<|im_end|>"]),
        add_bos=False,
        max_observation_tokens=4000,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """One turn of the engine."""

    session: str
    number: int
    context: list[int]
    tokens: list[int]
    logprobs: list[float]


class Counting:
    """Calls the tool until it has counted to what was last asked for; what it says depends on its ids alone."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._spelled: dict[str, list[int]] = {}

    def __call__(self, ids: Sequence[int], wish: Mapping[str, Any]) -> tuple[list[int], str]:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        seen = [int(found) for found in re.findall(r"<tool_response>\s*(\d+)", text)]
        asked = re.findall(r"count to (\d+)", text)
        now, goal = seen[-1] if seen else 0, int(asked[-1]) if asked else 0
        if now < goal:
            call = {"name": "add", "arguments": {"x": now, "why": 'a "quoted" word'}}
            said = f"next <tool_call>\n{json.dumps(call)}\n</tool_call>"
        else:
            mark = hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=3).hexdigest()
            said = f"done {now} {mark}"
        for stop in wish["stop"]:
            said = said[: said.index(stop) + len(stop)] if stop in said else said
        tokens = [number for letter in said for number in self._one(letter)]
        tokens += [] if any(said.endswith(stop) for stop in wish["stop"]) else [self._end]
        is_cut = len(tokens) > wish["max_tokens"]
        return tokens[: wish["max_tokens"]], "length" if is_cut else "stop"

    def _one(self, letter: str) -> list[int]:
        if letter not in self._spelled:
            self._spelled[letter] = self.tokenizer(letter, add_special_tokens=False)["input_ids"]
        return self._spelled[letter]


class Served:
    """The endpoint and the learner's side of it, in a thread. `close` it."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.tokenizer = make_tokenizer()
        self.sample: Callable[[Sequence[int], Mapping[str, Any]], tuple[list[int], str]] = Counting(self.tokenizer)
        self.delay_s = 0.0
        self.made: list[Made] = []
        """All turns, in the order of their ends."""
        self.taken: list[Mapping[str, Any]] = []
        """All wishes."""
        self.cancelled: list[tuple[str, int]] = []
        self.error: Mapping[str, Any] | None = None
        """The answer to all wishes instead."""
        self._trees: dict[str, RecordedTree] = {}
        self._sampling: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        spec = language_of(folder, self.tokenizer)
        self.url = self.run(self._start(spec, limits))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    def ask(self, ask: str, **fields: Any) -> dict[str, Any]:
        answer = self.run(self._link.ask({"ask": ask, **fields}, WAIT_S))
        assert "error" not in answer, answer
        return answer

    def open(self, **bounds: Any) -> dict[str, Any]:
        """A session: name, address and keys."""
        wide = {"max_tokens": 100_000, "max_model_length": 20_000, "sampling": SAMPLING}
        return self.ask("open", **{**wide, **bounds})

    def end(self, session: Mapping[str, Any]) -> dict[str, Any]:
        return self.ask("end", session=session["session"])

    @property
    def pid(self) -> int:
        return self._link.pid

    def made_in(self, session: Mapping[str, Any]) -> dict[int, Made]:
        return {made.number: made for made in self.made if made.session == session["session"]}

    def branches(
        self, session: Mapping[str, Any], end: Mapping[str, Any]
    ) -> list[tuple[list[int], list[int], list[bool]]]:
        """Context, tokens and mask of each branch of a trajectory that has ended.

        Raises:
            AssertionError: a turn that is trained was not sampled after exactly what precedes it, or is trained twice.
        """
        found = self._trees[session["session"]].trajectory(end)
        ids, mask = found.tokens.tolist(), [bool(part.finish_reason) for part in found.parts for _ in part.tokens]
        bounds = [(each.prompt_tokens.tolist(), each.start, each.end) for each in found.branches]
        bounds.append((found.context.tolist(), found.start, found.num_tokens))
        made = [(each.context, each.tokens) for each in self.made_in(session).values()]
        for turn in found.turns:
            context, start, _ = next(each for each in bounds if each[1] <= turn.start < each[2])
            made.remove((context + ids[start : turn.start], ids[turn.start : turn.end]))
        return [(context, ids[start:stop], mask[start:stop]) for context, start, stop in bounds]

    def close(self) -> None:
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self) -> None:
        tasks = [self._engine, *self._sampling.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._link.end()

    async def _start(self, spec: LanguageSpec, limits: Mapping[str, Any]) -> str:
        self._link = Link(Child("mgrpo.environments.endpoint.process", max_line_bytes=1 << 28), lambda why: None)
        question = {
            "ask": "load",
            "language": spec.to_json(),
            "host": "127.0.0.1",
            "port": 0,
            "public_url": None,
            "number": 7,
            "limits": limits,
            "worker_key": "the run's",
        }
        answer = await self._link.ask(question, WAIT_S)
        assert "error" not in answer, answer
        self._engine = asyncio.create_task(self._serve())
        return answer["url"]

    async def _serve(self) -> None:
        while True:
            news = await self._link.ask({"ask": "wishes"}, 1e6)
            self.taken += news["wishes"]
            for wish in news["wishes"]:
                name = wish["session"], wish["number"]
                self._sampling[name] = asyncio.create_task(self._answer(wish))
            for session, number in news["cancelled"]:
                self.cancelled.append((session, number))
                self._sampling.pop((session, number)).cancel()

    async def _answer(self, wish: Mapping[str, Any]) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        name = wish["session"], wish["number"]
        found: Mapping[str, Any]
        if self.error is not None:
            found = self.error
        else:
            tree = self._trees.setdefault(wish["session"], RecordedTree())
            context = tree.ask(wish["number"], wish["parent"], wish["added"], wish["rewrites"]).tolist()
            tokens, finish_reason = self.sample(context, wish)
            logprobs = (-np.random.default_rng(len(context)).random(len(tokens))).tolist()
            tree.sampled(
                wish["number"],
                Sampled(
                    tokens=np.array(tokens, np.int32),
                    logprobs=np.array(logprobs, np.float32),
                    policy_versions=np.zeros(len(tokens), np.int32),
                    finish_reason=finish_reason,
                ),
            )
            self.made.append(Made(*name, context, tokens, logprobs))
            found = {"tokens": tokens, "logprobs": logprobs, "finish_reason": finish_reason}
        await self._link.ask({"ask": "sampled", "session": name[0], "number": name[1], **found}, WAIT_S)
