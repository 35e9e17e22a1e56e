"""The rows that a mix takes of each source: the same as in Open Instruct.

An amount with a point is a share of the source's rows, computed in double precision and rounded down; one without is a
count. Whole passes over the source come first, in its order, then a random remainder without repeats, always the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_log = logging.getLogger(__name__)

# Open Instruct's seed for choosing a part of a dataset.
_SUBSET_SEED = 42
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a mix."""

    source: str
    """A path, or the name of a dataset."""
    amount: str
    split: str

    def __post_init__(self) -> None:
        _parse(self)

    def num_taken(self, num_rows: int) -> int:
        """The number of rows that are taken of a source with `num_rows`."""
        amount = _parse(self)
        return int(amount * num_rows) if isinstance(amount, float) else amount

    def rows(self, num_rows: int) -> np.ndarray:
        """`[num_taken]` int64: the rows that are taken, in the order of the mix."""
        passes, remainder = divmod(self.num_taken(num_rows), num_rows)
        whole = np.tile(np.arange(num_rows, dtype=np.int64), passes)
        if not remainder:
            return whole
        rest = np.random.RandomState(_SUBSET_SEED).choice(num_rows, size=remainder, replace=False)
        return np.concatenate([whole, rest.astype(np.int64)])

    def warn_if_few(self, num_rows: int) -> None:
        """Warn if the amount is 1 where 1.0 may have been meant."""
        if isinstance(_parse(self), int) and self.num_taken(num_rows) <= 10 and num_rows > 100:
            _log.warning(
                "amount %s takes %d of the %d rows of %s; a share needs a point: %s.0",
                self.amount,
                self.num_taken(num_rows),
                num_rows,
                self.source,
                self.amount,
            )


def entries(mixer_list: Sequence[object], splits: Sequence[str]) -> list[Entry]:
    """The lines of a mix that is written source, amount, source, amount, ...; `splits` are one for all or one each."""
    words = [str(word) for word in mixer_list]
    if len(words) % 2:
        raise ValueError(
            f"the data mix has {len(words)} entries ({' '.join(words)}); "
            "expected pairs of source and amount, for example data.jsonl 1.0"
        )
    sources, amounts = words[::2], words[1::2]
    if len(splits) not in (1, len(sources)):
        raise ValueError(f"{len(splits)} splits for {len(sources)} data sets; give one for all or one each")
    each = splits if len(splits) == len(sources) else [splits[0]] * len(sources)
    return [
        Entry(source=source, amount=amount, split=split)
        for source, amount, split in zip(sources, amounts, each, strict=True)
    ]


def _parse(entry: Entry) -> float | int:
    """A share or a count."""
    try:
        parsed = float(entry.amount) if "." in entry.amount else int(entry.amount)
    except ValueError:
        parsed = -1
    if not 0 <= parsed <= _MOST:
        raise ValueError(
            f"amount {entry.amount!r} of {entry.source} is neither a share (with a point, 1.0 is all rows) "
            f"nor a count of rows, at most {_MOST}"
        )
    return parsed
