"""Endpoints in processes of their own, and the learner that they ask, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgrpo.environments.workers.link import Link
from mgrpo.processes.json_lines import Child
from tests.unit.environments.chat_templates import make_tokenizer
from tests.unit.environments.endpoint.scripted import Engine, Learner
from tests.unit.environments.endpoint.served import language_of

PROGRAM = "mgrpo.environments.endpoint.process"
LONG_S = 600.0
LIMITS = {"max_turns": 64, "max_open_calls": 16, "body_bytes": 1 << 20, "body_s": 10.0, "max_branches": 64}
ROOM = {"max_tokens": 100_000, "max_model_length": 10_000, "per_turn_max_tokens": None, "deadline_s": None}


@dataclass
class Served:
    """One endpoint, as the learner sees it."""

    link: Link
    learner: Learner
    url: str = ""
    listens: str = ""
    """Its own address, also behind a public one."""
    delay_s: float = 0.0
    """How long an answer takes."""

    async def ask(self, question: str, **fields: Any) -> dict[str, Any]:
        answer = await self.link.ask({"ask": question, **fields}, LONG_S)
        assert "error" not in answer, answer
        return answer

    async def open(self, **fields: Any) -> dict[str, Any]:
        """A new session."""
        given = ROOM | {"trajectory": "t", "sampling": {"temperature": 1.0}, "task": None} | fields
        return await self.ask("open", **given)

    async def answer_wishes(self) -> None:
        """Sample whatever is wished for, until cancelled."""
        while True:
            for wish in (await self.ask("wishes"))["wishes"]:
                await asyncio.sleep(self.delay_s)
                await self.ask("sampled", **self.learner.answer(wish))


@contextlib.asynccontextmanager
async def endpoints(folder: Path, *, num: int = 1, children: Any = None, **load: Any) -> AsyncIterator[list[Served]]:
    """So many.

    Args:
        folder: for the tokenizer.
        children: what to ask instead of processes that are started here.
    """
    tokenizer = make_tokenizer()
    language = language_of(folder, tokenizer)
    given = {
        "language": language.to_json(),
        "host": "127.0.0.1",
        "port": 0,
        "public_url": None,
        "limits": LIMITS,
        "worker_key": None,
    }
    children = children or [Child(PROGRAM, max_line_bytes=1 << 26) for _ in range(num)]
    links = [Link(child, lambda why: None) for child in children]
    tasks: list[asyncio.Task[None]] = []
    try:
        found = []
        learner = Learner(Engine(tokenizer))
        for number, link in enumerate(links):
            served = Served(link, learner)
            answer = await served.ask("load", number=number, **given | load)
            served.url, served.listens = answer["url"], f"http://127.0.0.1:{answer['port']}"
            found.append(served)
            tasks.append(asyncio.create_task(served.answer_wishes()))
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in links:
            link.end()
