"""From rows to tokens: template, bos token, tokenizer, length limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from json import loads
from typing import Any, Literal, Protocol

import numpy as np

from mgrpo.data.rows import Contract, Message
from mgrpo.data.templates import override_system, render, with_bos, with_changed_question
from mgrpo.data.tokenizer import token_ids


class ToolSchemas(Protocol):
    """The tools of a run."""

    def schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Those that the row may call; raises ValueError where it asks for what there is not."""

    def to_json(self) -> dict[str, Any]:
        """Everything that decides them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the tokens of a row, besides the tokenizer."""

    template: str | None
    """Jinja; None joins the contents of messages by newlines."""
    template_kwargs: dict[str, Any]
    add_bos: bool
    system_prompt: str | None
    max_tokens: int
    overlong: Literal["filter", "truncate_left", "error"]
    contract: Contract
    tools: ToolSchemas | None = None
    """Tools, the schemas of which the template is given. None: there are none, or it is not told of them."""

    def to_json(self) -> dict[str, Any]:
        """For the key of a cache."""
        return dataclasses.asdict(self) | {"tools": None if self.tools is None else self.tools.to_json()}

    def asked(self, record: Mapping[str, object], *, change: Callable[[str], str] | None = None) -> str | list[Message]:
        """The question to the model: text, or the messages that the template is given.

        Args:
            change: makes another text of the question, or of the last message of the user in it.
        """
        prompt = self.contract.prompt(record)
        if isinstance(prompt, str):
            return change(prompt) if change else prompt
        messages = prompt if self.system_prompt is None else override_system(prompt, self.system_prompt)
        return with_changed_question(messages, change) if change else messages

    def text(self, record: Mapping[str, object], tokenizer: Any, *, change: Callable[[str], str] | None = None) -> str:
        """The prompt's text, with all special tokens written out; `change` as in `asked`."""
        asked = self.asked(record, change=change)
        tools = None if self.tools is None else self.tools.schemas(record)
        if isinstance(asked, list) and self.template is not None:
            return render(
                asked, tokenizer, self.template, add_bos=self.add_bos, kwargs=self.template_kwargs, tools=tools
            )
        text = asked if isinstance(asked, str) else "\n".join(str(message["content"]) for message in asked)
        return with_bos(text, tokenizer) if self.add_bos else text

    def shortened(self, tokens: np.ndarray, tokenizer: Any) -> tuple[np.ndarray, str]:
        """The part of a prompt over the limit that is kept: nothing, unless it is cut."""
        if self.overlong != "truncate_left":
            return tokens[:0], ""
        tokens = tokens[-self.max_tokens :]
        return tokens, tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Makes prompts from a batch of rows, for `Dataset.map`."""

    recipe: Recipe
    tokenizer: Any
    threads: Executor
    num_threads: int

    def __call__(self, records: Sequence[str]) -> dict[str, Sequence[Any] | np.ndarray]:
        """The new columns for rows in JSON."""
        texts, problems = [""] * len(records), [""] * len(records)
        for index, record in enumerate(records):
            try:
                texts[index] = self.recipe.text(loads(record), self.tokenizer)
            except ValueError as err:
                problems[index] = str(err)
        tokens = [
            np.array(ids, np.int32)
            for ids in token_ids(self.tokenizer, texts, threads=self.threads, num_threads=self.num_threads)
        ]
        lengths = np.array([len(ids) for ids in tokens])
        for index in np.flatnonzero(lengths == 0):
            problems[index] = problems[index] or "the prompt has no tokens"
        for index in np.flatnonzero(lengths > self.recipe.max_tokens):
            tokens[index], texts[index] = self.recipe.shortened(tokens[index], self.tokenizer)
        return {"text": texts, "tokens": tokens, "num_tokens": lengths, "problem": problems}
