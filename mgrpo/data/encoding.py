"""Rows to tokens, a chunk at a time: the template, the first token, the tokenizer, the limit. The same in every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import loads
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mgrpo.data.checking import MOST_SHOWN
from mgrpo.data.rows import Contract, Message
from mgrpo.data.tables import Table, Writer, record_batch
from mgrpo.data.templates import override_system, render, with_bos
from mgrpo.data.tokenizer import load_described, token_ids

if TYPE_CHECKING:
    import pyarrow

_CHUNK_ROWS = 1024
_CHUNK_CHARS = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What makes tokens of a row, besides the tokenizer; in JSON."""

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


@dataclass(slots=True)
class Account:
    """What became of the rows of a task, in JSON; rows are [source, line]."""

    num_rows: int = 0
    problems: list[list[Any]] = dataclasses.field(default_factory=list)
    """[source, line, error] of the first bad rows."""
    num_problems: int = 0
    too_long: list[list[Any]] = dataclasses.field(default_factory=list)
    """[source, line, number of tokens] of the first prompts over the limit."""

    def add_problem(self, source: int, line: int, problem: str) -> None:
        """Count a row that has no prompt."""
        self.num_problems += 1
        if len(self.problems) < MOST_SHOWN:
            self.problems.append([source, line, problem])


class Encoder:
    """Makes tables of prompts (see `tables`) of tables of rows."""

    def __init__(self, recipe: Recipe, tokenizer: Any, tables: Sequence[Table]) -> None:
        self._recipe, self._tokenizer, self._tables = recipe, tokenizer, tables

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Encoder:
        """An encoder from {"recipe", "tokenizer": of `describe`, "files": for each source a list of paths}."""
        tables = [Table.open(files) for files in values["files"]]
        return cls(Recipe.from_json(values["recipe"]), load_described(values["tokenizer"]), tables)

    def encode_task(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Encode the rows of a task, {"source": number, "rows": indices or "span": [start, end], "out": path}."""
        rows = range(*task["span"]) if "span" in task else task["rows"]
        account = Account()
        with Writer(task["out"]) as writer:
            for chunk, texts in self._chunks(task["source"], rows, account):
                writer.add(self._encode(task["source"], chunk, texts, account))
        return dataclasses.asdict(account)

    def _chunks(self, source: int, rows: Sequence[int], account: Account) -> Iterator[tuple[list[int], list[str]]]:
        """Rows and their texts, as many as are encoded at once."""
        chunk, texts, size = [], [], 0
        for row in rows:
            account.num_rows += 1
            try:
                text = self._text(loads(self._tables[source].value("text", row)))
            except ValueError as err:
                account.add_problem(source, self._tables[source].value("line", row), str(err))
                continue
            chunk.append(row)
            texts.append(text)
            size += len(text)
            if len(chunk) == _CHUNK_ROWS or size > _CHUNK_CHARS:
                yield chunk, texts
                chunk, texts, size = [], [], 0
        if chunk:
            yield chunk, texts

    def _text(self, record: Mapping[str, object]) -> str:
        recipe, asked = self._recipe, self._recipe.asked(record)
        if isinstance(asked, list) and recipe.template is not None:
            return render(
                asked, self._tokenizer, recipe.template, add_bos=recipe.add_bos, kwargs=recipe.template_kwargs
            )
        text = asked if isinstance(asked, str) else "\n".join(str(message["content"]) for message in asked)
        return with_bos(text, self._tokenizer) if recipe.add_bos else text

    def _encode(self, source: int, rows: list[int], texts: list[str], account: Account) -> pyarrow.RecordBatch:
        recipe, table = self._recipe, self._tables[source]
        encoded = token_ids(self._tokenizer, texts)
        lengths = [len(ids) for ids in encoded]
        for number, length in enumerate(lengths):
            if length == 0:
                account.add_problem(source, table.value("line", rows[number]), "the prompt has no tokens")
            if length <= recipe.max_tokens:
                continue
            if len(account.too_long) < MOST_SHOWN:
                account.too_long.append([source, table.value("line", rows[number]), length])
            if recipe.overlong == "truncate_left":
                encoded[number] = encoded[number][-recipe.max_tokens :]
                texts[number] = self._tokenizer.decode(
                    encoded[number], skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            else:
                encoded[number], texts[number] = [], ""
        return record_batch(
            numbers={
                "source": np.full(len(rows), source, np.int32),
                "row": np.array(rows, np.int64),
                "num_tokens": np.array(lengths, np.int64),
            },
            texts={"text": texts},
            tokens={"tokens": encoded},
        )
