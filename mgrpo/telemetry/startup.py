"""What a start is waiting for: a line for each part, with the seconds that have passed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


def _print(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Counts from when it is made."""

    clock: Callable[[], float] = time.monotonic
    write: Callable[[str], None] = _print
    began: float = field(default_factory=time.monotonic)

    def say(self, what: str) -> None:
        """What begins now."""
        self.write(f"[{self.clock() - self.began:4.0f} s] {what}")
