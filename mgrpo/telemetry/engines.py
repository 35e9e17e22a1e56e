"""States of a run's engines by step, in `engines.jsonl` of its folder: a line whenever they differ from those before."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgrpo.telemetry.files import take_over

ENGINES = "engines.jsonl"


class EngineStates:
    """Writes the file.

    Args:
        resumed_after: the step after which this run continues the run that wrote the file; its later lines are removed.
            None: a new run.
    """

    def __init__(self, folder: Path, *, resumed_after: int | None = None) -> None:
        self.path = folder / ENGINES
        self._last: Sequence[dict[str, Any]] = []
        take_over(self.path, resumed_after)

    def write(self, step: int, engines: Sequence[dict[str, Any]]) -> None:
        """Record the states after a step: of each engine its number, state, number of starts and last failure."""
        if engines == self._last:
            return
        self._last = engines
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time/unix": time.time(), "engines": engines}) + "\n")
