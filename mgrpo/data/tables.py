"""Tables on disk: Arrow files that are memory-mapped, so that a million rows are neither read nor held until asked for.

Two kinds: rows (`line`, `text`: a checked row as JSON) and prompts (`source`, `row`, `num_tokens`, `tokens`, `text`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow

    from mgrpo.data.checking import Checked

_BATCH_ROWS = 2048
_BATCH_BYTES = 8 * 2**20


class Table:
    """Record batches, in memory or in files, as one list of rows."""

    def __init__(self, batches: Sequence[pyarrow.RecordBatch]) -> None:
        self._batches = list(batches)
        self._ends = list(accumulate(len(batch) for batch in self._batches))

    @classmethod
    def open(cls, paths: Sequence[str | Path]) -> Table:
        """Map files; their rows follow each other. The map holds when the files are deleted."""
        import pyarrow

        batches = []
        for path in paths:
            reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
            batches += [reader.get_batch(number) for number in range(reader.num_record_batches)]
        return cls(batches)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def value(self, column: str, index: int) -> Any:
        """One value: a Python one, or the `[len]` array of a list."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        batch = self._batches[number]
        value = batch.column(column)[index - self._ends[number] + len(batch)]
        return _view(value.values) if hasattr(value, "values") else value.as_py()

    def numbers(self, column: str) -> np.ndarray:
        """A whole column of numbers."""
        arrays = [_view(batch.column(column)) for batch in self._batches]
        return np.concatenate(arrays) if arrays else np.empty(0, np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(batch.nbytes for batch in self._batches)

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        """The batches in order."""
        return iter(self._batches)


class Writer:
    """Writes batches to an Arrow file; there is none if there were no batches. The file ends with the `with` block."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._file: Any = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, batch: pyarrow.RecordBatch) -> None:
        """Write a batch; all have the columns of the first."""
        if self._file is None:
            import pyarrow

            self._file = pyarrow.ipc.new_file(self._path, batch.schema)
        self._file.write_batch(batch)


def row_batches(checked: Checked) -> Iterator[pyarrow.RecordBatch]:
    """Checked rows as batches of bounded size."""
    start, size = 0, 0
    for index, text in enumerate(checked.texts):
        size += len(text)
        if index + 1 - start == _BATCH_ROWS or size > _BATCH_BYTES or index + 1 == len(checked.texts):
            chosen = slice(start, index + 1)
            lines = np.array(checked.lines[chosen], np.int64)
            yield record_batch(numbers={"line": lines}, texts={"text": checked.texts[chosen]})
            start, size = index + 1, 0


def record_batch(
    *,
    numbers: Mapping[str, np.ndarray],
    texts: Mapping[str, Sequence[str]] | None = None,
    tokens: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> pyarrow.RecordBatch:
    """A batch of columns by their names; token ids become int32."""
    import pyarrow

    columns = {name: _number_array(values) for name, values in numbers.items()}
    for name, values in (tokens or {}).items():
        ids = np.fromiter(chain.from_iterable(values), np.int32)
        kind = pyarrow.large_list(pyarrow.int32())
        buffers = [None, _offsets(values)]
        columns[name] = pyarrow.Array.from_buffers(kind, len(values), buffers, children=[_number_array(ids)])
    for name, values in (texts or {}).items():
        encoded = [value.encode() for value in values]
        buffers = [None, _offsets(encoded), pyarrow.py_buffer(b"".join(encoded))]
        columns[name] = pyarrow.Array.from_buffers(pyarrow.large_string(), len(values), buffers)
    return pyarrow.record_batch(list(columns.values()), names=list(columns))


# By their buffers: pyarrow's own conversions look whether they are given something of pandas, and import it for that.
def _view(array: pyarrow.Array) -> np.ndarray:
    """The numbers of an array without nulls; not a copy."""
    bits = array.type.bit_width
    values = np.frombuffer(array.buffers()[1], dtype=f"int{bits}") if len(array) else np.empty(0, f"int{bits}")
    return values[array.offset : array.offset + len(array)]


def _number_array(values: np.ndarray) -> pyarrow.Array:
    import pyarrow

    kind = pyarrow.from_numpy_dtype(values.dtype)
    return pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(np.ascontiguousarray(values))])


def _offsets(values: Sequence[Sized]) -> pyarrow.Buffer:
    import pyarrow

    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pyarrow.py_buffer(offsets)
