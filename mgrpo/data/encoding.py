"""From rows to tokens: template, bos token, tokenizer, length limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from json import loads
from typing import Any, Literal

import numpy as np

from mgrpo.data.rows import Contract, Message
from mgrpo.data.templates import override_system, render, with_bos
from mgrpo.data.tokenizer import token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What decides the tokens of a row, besides the tokenizer; in JSON."""

    template: str | None
    """Jinja; None joins the contents of messages by newlines."""
    template_kwargs: dict[str, Any]
    add_bos: bool
    system_prompt: str | None
    max_tokens: int
    overlong: Literal["filter", "truncate_left", "error"]
    contract: Contract

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recipe:
        """The inverse of `to_json`."""
        return cls(**{**values, "contract": Contract(**values["contract"])})

    def asked(self, record: Mapping[str, object]) -> str | list[Message]:
        """What the model is asked: text, or the messages that the template is given."""
        prompt = self.contract.prompt(record)
        if isinstance(prompt, str) or self.system_prompt is None:
            return prompt
        return override_system(prompt, self.system_prompt)

    def text(self, record: Mapping[str, object], tokenizer: Any) -> str:
        """The prompt's text, with all special tokens written out."""
        asked = self.asked(record)
        if isinstance(asked, list) and self.template is not None:
            return render(asked, tokenizer, self.template, add_bos=self.add_bos, kwargs=self.template_kwargs)
        text = asked if isinstance(asked, str) else "\n".join(str(message["content"]) for message in asked)
        return with_bos(text, tokenizer) if self.add_bos else text


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
            tokens[index], texts[index] = self._shortened(tokens[index])
        return {"text": texts, "tokens": tokens, "num_tokens": lengths, "problem": problems}

    def _shortened(self, tokens: np.ndarray) -> tuple[np.ndarray, str]:
        """What is kept of a prompt over the limit: nothing, unless it is cut."""
        if self.recipe.overlong != "truncate_left":
            return tokens[:0], ""
        tokens = tokens[-self.recipe.max_tokens :]
        return tokens, self.tokenizer.decode(
            tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
