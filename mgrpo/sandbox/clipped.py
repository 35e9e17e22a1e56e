"""Text that is cut in the middle: its beginning and its end hold most of the information."""

from __future__ import annotations


class Clipped:
    """Collects UTF-8 text of any length, and keeps `most_bytes` of it."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._head_bytes, self._tail_bytes = most_bytes - most_bytes // 2, most_bytes // 2
        self._head, self._tail = bytearray(), bytearray()
        self._num_left_out = 0

    def add(self, data: bytes) -> None:
        space = self._head_bytes - len(self._head)
        self._head += data[:space]
        self._tail += data[space:]
        num_surplus = max(len(self._tail) - self._tail_bytes, 0)
        del self._tail[:num_surplus]
        self._num_left_out += num_surplus

    def text(self) -> str:
        if not self._num_left_out:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = self._head.decode("utf-8", "ignore"), self._tail.decode("utf-8", "ignore")
        return f"{head}\n... {self._num_left_out} bytes left out ...\n{tail}"
