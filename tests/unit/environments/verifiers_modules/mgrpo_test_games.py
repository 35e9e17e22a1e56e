"""An environment of the library `verifiers`, as packages of that library define them."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)


async def length(completion: Any) -> float:
    return float(len(completion))


class Twice(vf.MultiTurnEnv):
    """Asks whether the model is sure, once."""

    fails = ""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        if self.fails == "by itself":
            raise vf.InfraError("no machine")
        return [vf.UserMessage(content="Sure?")] * (2 if self.fails else 1)


def load_environment(kind: str = "tools", turns: int = 2, fails: str = "", bad: bool = False) -> vf.Environment:
    if bad:
        raise RuntimeError("bad settings")
    data = Dataset.from_list([{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(3)])
    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=5, dataset=data, rubric=rubric, system_prompt="Add.")
    game = Twice(dataset=data, rubric=rubric, max_turns=turns)
    game.fails = fails
    return game
