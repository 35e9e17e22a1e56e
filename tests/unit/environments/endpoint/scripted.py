"""An engine that thinks and counts, in spellings that no tokenizer gives, and the learner that records its turns as a run does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from mgrpo.environments.agents.recorded_tree import RecordedTree
from mgrpo.environments.loop.trajectory import Sampled


class Engine:
    """Asked to "count to N", it calls the tool `add` until that has answered N. What it says depends on the ids alone."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.log: list[tuple[list[int], list[int]]] = []
        """Context and tokens of each turn."""

    def sample(self, context: np.ndarray, max_tokens: int) -> Sampled:
        text = self.tokenizer.decode(context)
        seen = [int(number) for number in re.findall(r"<tool_response>\s*(\d+)", text)]
        goals = re.findall(r"count to (\d+)", text)
        now, goal = (seen or [0])[-1], int(goals[-1]) if goals else 0
        if now < goal:
            call = {"name": "add", "arguments": {"x": now, "why": 'a "quoted" word'}}
            said = f"<think>{now} < {goal}</think>I add.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        else:
            said = f"I have counted to {now}"
        # One token a character: never as a tokenizer would.
        tokens = [token for each in said for token in self.tokenizer(each, add_special_tokens=False)["input_ids"]]
        tokens = [*tokens, self.end][:max_tokens]
        self.log.append((context.tolist(), tokens))
        return Sampled(
            tokens=np.array(tokens, np.int32),
            logprobs=-np.random.default_rng(len(context)).random(len(tokens)).astype(np.float32),
            policy_versions=np.zeros(len(tokens), np.int32),
            finish_reason="stop" if tokens[-1] == self.end else "length",
        )


class Learner:
    """Rank 0's part: it records what each turn was sampled after."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trees: dict[str, RecordedTree] = {}

    def answer(self, wish: dict[str, Any]) -> dict[str, Any]:
        """The question `sampled` for a wish."""
        tree = self.trees.setdefault(wish["session"], RecordedTree())
        context = tree.ask(wish["number"], wish["parent"], wish["added"], wish["rewrites"])
        sampled = self.engine.sample(context, wish["max_tokens"])
        tree.sampled(wish["number"], sampled)
        return {
            "session": wish["session"],
            "number": wish["number"],
            "tokens": sampled.tokens.tolist(),
            "logprobs": sampled.logprobs.tolist(),
            "finish_reason": sampled.finish_reason,
        }

    def branches(self, session: str, end: Mapping[str, Any]) -> list[tuple[list[int], list[int], list[bool]]]:
        """What is trained: the context, the tokens and the mask of each branch.

        Raises:
            AssertionError: a turn in it was not sampled after exactly what precedes it.
        """
        found = self.trees[session].trajectory(end)
        tokens = found.tokens.tolist()
        mask = [bool(part.finish_reason) for part in found.parts for _ in part.tokens]
        bounds = [(branch.prompt_tokens, branch.start, branch.end) for branch in found.branches]
        bounds.append((found.context, found.start, found.num_tokens))
        for turn in found.turns:
            context, start = next((context, start) for context, start, stop in bounds if start <= turn.start < stop)
            before = context.tolist() + tokens[start : turn.start]
            assert (before, tokens[turn.start : turn.end]) in self.engine.log
        return [(context.tolist(), tokens[start:stop], mask[start:stop]) for context, start, stop in bounds]
