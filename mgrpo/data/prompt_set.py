"""Every prompt of a run by its index, made from memory-mapped tables on access.

It is opened with pyarrow alone, because importing `datasets` takes longer than all of a start from the cache.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mgrpo.data.encoding import Recipe
from mgrpo.data.rows import Message
from mgrpo.data.tokenizer import special_token, token_ids
from mgrpo.types import Prompt, PromptId

if TYPE_CHECKING:
    import pyarrow

PROMPTS = "prompts.arrow"
"""The distinct rows: source (number), line, record (JSON), text, tokens, num_tokens (before any were cut), problem."""
ORDER = "order.npy"
"""Place of each prompt of the mix among the distinct rows."""
STATISTICS = "statistics.json"


class PromptSet:
    """Prompts, labels and columns; a prompt and its labels come from one row. Safe to use from several threads."""

    statistics: Mapping[str, Any]
    """The result of `statistics_of`; also in the folder's statistics.json."""
    folder: Path
    """The folder of the tables, now or earlier: they may be deleted while they are in use."""

    def __init__(
        self, folder: Path, recipe: Recipe, sources: Sequence[str], *, named: Sequence[Mapping[str, Any]]
    ) -> None:
        """Open the files of `building`.

        Args:
            sources: the names of the sources.
            named: names of the lines of the mix in this run: the same content may have been prepared under others.
        """
        self.folder = folder
        statistics = json.loads((folder / STATISTICS).read_text())
        own = [part | name for part, name in zip(statistics["sources"], named, strict=True)]
        self.statistics = statistics | {"sources": own}
        self._recipe, self._sources = recipe, list(sources)
        self._prompts = open_prompts(folder)
        self._order = np.load(folder / ORDER, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._order)

    def source_of(self, index: int) -> str:
        """The name of the dataset that the prompt at `index` comes from."""
        return self._sources[self._value("source", int(self._order[index])).as_py()]

    def beyond(self, vocab: int) -> tuple[str, int, str] | None:
        """The first prompt with a token that a model of `vocab` tokens does not have: its place, the token, and its text."""
        if self.statistics["largest_token"] < vocab:
            return None
        for position in range(len(self._prompts)):
            tokens = _view(self._value("tokens", position).values)
            if len(tokens) and tokens.max() >= vocab:
                source = self._sources[self._value("source", position).as_py()]
                return (
                    f"{source}:{self._value('line', position)}",
                    int(tokens.max()),
                    self._value("text", position).as_py(),
                )
        raise AssertionError("the statistics are those of the prompts")

    def num_without_first(self, token: int) -> int:
        """The number of distinct prompts that begin with another token, without those that were left out or cut."""
        found = 0
        for batch in self._prompts.select(["tokens", "num_tokens"]).to_batches():
            tokens, lengths = batch.column("tokens"), _view(batch.column("num_tokens"))
            starts, values = _view(tokens.offsets), _view(tokens.values)
            is_whole = (np.diff(starts) == lengths) & (lengths > 0)
            found += int((values[starts[:-1][is_whole]] != token).sum())
        return found

    def num_ending_with(self, text: str) -> int:
        """The number of distinct prompts that end with a text, and white space."""
        chunks = self._prompts.column("text").chunks
        return sum(prompt.rstrip().endswith(text) for chunk in chunks for prompt in chunk.to_pylist())

    def prompt(self, prompt_id: PromptId) -> Prompt:
        """The prompt at the index of `prompt_id` (epoch, index)."""
        position, record = self._row(prompt_id)
        text = self._value("text", position).as_py()
        contract = self._recipe.contract
        verifiers, ground_truths = contract.labels(record)
        query, source = self._views(record, text)
        return Prompt(
            id=prompt_id,
            tokens=_view(self._value("tokens", position).values).copy(),
            text=text,
            verifiers=verifiers,
            ground_truths=ground_truths,
            query=query,
            source=source,
            columns=contract.columns(record),
        )

    def asked(self, prompt: Prompt) -> str | list[Message]:
        """The question to the model: text, or the messages that the template is given."""
        return self._recipe.asked(self._row(prompt.id)[1])

    def with_opening(self, prompt: Prompt, opening: str, tokenizer: Any) -> Prompt:
        """The prompt with the text that an environment begins with, which follows the last message of the user.

        Raises:
            ValueError: it has too many tokens, and prompts are not to be cut; or the text holds a special token.
        """
        if not opening:
            return prompt
        if special := special_token(tokenizer, opening):
            raise ValueError(
                f"the text that an environment begins with ({opening[:60]!r}) holds the special token {special!r}, which would end a "
                "turn or begin one; have the environment leave it out"
            )
        recipe, (_, record) = self._recipe, self._row(prompt.id)
        text = recipe.text(record, tokenizer, change=_added(opening))
        tokens = np.array(token_ids(tokenizer, [text])[0], np.int32)
        if len(tokens) > recipe.max_tokens:
            if recipe.overlong != "truncate_left":
                raise ValueError(
                    f"a prompt has {len(tokens)} tokens with the text that its environment begins with, more than "
                    f"max_prompt_token_length={recipe.max_tokens}; raise that, or shorten the text ({opening[:60]!r})"
                )
            tokens, text = recipe.shortened(tokens, tokenizer)
        query, source = self._views(record, text, change=_added(opening))
        return dataclasses.replace(prompt, tokens=tokens, text=text, opening=opening, query=query, source=source)

    def reworded(self, prompt: Prompt, change: Callable[[str], str], tokenizer: Any) -> np.ndarray:
        """`[len]` int32: the prompt with another text of the user's last message, which `change` makes of it; never cut."""
        opened = _added(prompt.opening)
        text = self._recipe.text(self._row(prompt.id)[1], tokenizer, change=lambda text: change(opened(text)))
        return np.array(token_ids(tokenizer, [text])[0], np.int32)

    def _row(self, prompt_id: PromptId) -> tuple[int, dict[str, Any]]:
        """Place of a prompt among the distinct rows, and its columns."""
        position = int(self._order[prompt_id[1]])
        return position, json.loads(self._value("record", position).as_py())

    def _views(
        self, record: Mapping[str, object], text: str, *, change: Callable[[str], str] | None = None
    ) -> tuple[str, str | tuple[dict[str, str], ...]]:
        """`query` and `source` of a prompt."""
        asked = self._recipe.asked(record, change=change)
        if isinstance(asked, str):
            return asked, asked
        query = "\n".join(f"{message['role']}: {message['content']}" for message in asked)
        return query, tuple(asked) if self._recipe.contract.is_own_prompt(record) else text

    def _value(self, column: str, position: int) -> Any:
        return self._prompts.column(column)[position]


def _added(opening: str) -> Callable[[str], str]:
    return lambda text: text + opening


def open_prompts(folder: Path) -> pyarrow.Table:
    """The prompts of the distinct rows of a mix, memory-mapped; they hold when the files are deleted."""
    import pyarrow

    return pyarrow.ipc.open_stream(pyarrow.memory_map(str(folder / PROMPTS))).read_all()


def num_tokens(prompts: pyarrow.Table) -> np.ndarray:
    """`[distinct rows]` int64: tokens of the prompts before any were left out or cut."""
    return np.concatenate([_view(chunk) for chunk in prompts.column("num_tokens").chunks])


def largest_token(prompts: pyarrow.Table) -> int:
    """The largest token of the prompts that are kept; -1 without any."""
    return max((int(_view(chunk.flatten()).max(initial=-1)) for chunk in prompts.column("tokens").chunks), default=-1)


def _view(numbers: pyarrow.Array) -> np.ndarray:
    """Numbers without nulls, not copied; `to_numpy` would import pandas, which takes half a second."""
    dtype = np.dtype(f"int{numbers.type.bit_width}")
    if not len(numbers):
        return np.empty(0, dtype)
    return np.frombuffer(numbers.buffers()[1], dtype)[numbers.offset : numbers.offset + len(numbers)]
