"""Every prompt of a run by its index, made from memory-mapped tables when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.data.encoding import Recipe
from mgrpo.data.sources import Source
from mgrpo.data.tables import Table
from mgrpo.types import Prompt, PromptId


class PromptSet:
    """Prompts, labels and columns; a prompt and its labels come from one row and cannot part. Any thread may ask."""

    statistics: Mapping[str, Any]
    """Of `statistics_of`; also in the folder's statistics.json."""
    folder: Path
    """Where the tables are, or were: they may be deleted while they are in use."""

    def __init__(
        self, folder: Path, recipe: Recipe, sources: Sequence[Source], *, named: Sequence[Mapping[str, Any]]
    ) -> None:
        """Open what `building` wrote from `sources`; `named` says what the lines of the mix are called here."""
        self.folder = folder
        statistics = json.loads((folder / "statistics.json").read_text())
        own = [part | name for part, name in zip(statistics["sources"], named, strict=True)]
        self.statistics = statistics | {"sources": own}
        self._recipe = recipe
        # Now and not when the first thread asks: a source makes its table once.
        self._names, self._rows = [source.name for source in sources], [source.table for source in sources]
        self._encoded = Table.open(sorted(folder.glob("prompts-*.arrow")))
        self._order = Table.open([folder / "order.arrow"]).numbers("position")

    def __len__(self) -> int:
        return len(self._order)

    @property
    def num_left_out(self) -> int:
        """Rows over the limit that are no prompts."""
        return self.statistics["total"]["taken"] - self.statistics["total"]["prompts"]

    @property
    def lengths(self) -> np.ndarray:
        """`[prompts]` int64: tokens of each prompt."""
        lengths = self._encoded.numbers("num_tokens")[self._order]
        return np.minimum(lengths, self._recipe.max_tokens)

    def source_of(self, index: int) -> str:
        """The name of the dataset that the prompt at `index` comes from."""
        return self._names[self._encoded.value("source", int(self._order[index]))]

    def prompt(self, prompt_id: PromptId) -> Prompt:
        """The prompt at the index of `prompt_id` (epoch, index)."""
        position = int(self._order[prompt_id[1]])
        rows = self._rows[self._encoded.value("source", position)]
        record = json.loads(rows.value("text", self._encoded.value("row", position)))
        text = self._encoded.value("text", position)
        contract, asked = self._recipe.contract, self._recipe.asked(record)
        verifiers, ground_truths = contract.labels(record)
        if isinstance(asked, str):
            query, source = asked, asked
        else:
            query = "\n".join(f"{message['role']}: {message['content']}" for message in asked)
            source = tuple(asked) if contract.is_own_prompt(record) else text
        return Prompt(
            id=prompt_id,
            tokens=np.array(self._encoded.value("tokens", position), dtype=np.int32),
            text=text,
            verifiers=verifiers,
            ground_truths=ground_truths,
            query=query,
            source=source,
            columns=contract.columns(record),
        )
