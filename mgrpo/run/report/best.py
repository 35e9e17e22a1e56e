"""The best export of a run (`load_best_model_at_end`), and the pointer to it. Rank 0 only.

`hf/best.json` names it; the link `hf/best` leads to it, where the file system has links, so that
`from_pretrained("OUTPUT/hf/best")` and an engine load it. The exports themselves are never deleted.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgrpo.config import ConfigError
from mgrpo.config.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """An export and its value of the metric."""

    step: int
    metric: str
    value: float
    greater_is_better: bool

    def __str__(self) -> str:
        return f"step {self.step}, {self.metric} {self.value:.4g}"


class BestExport:
    """Compares exports by the evaluation at the same step. The earlier of equals stays; NaN is never the best."""

    def __init__(self, folder: Path, settings: Checkpoint, resumed: Mapping[str, Any] | None = None) -> None:
        """Write the pointer of the state that the run continues, or remove that of an earlier run.

        Args:
            folder: the exports' folder.
            resumed: `state_dict` of that state. If its best export has been deleted since, there is none.
        """
        self.folder, self.settings = folder, settings
        self.evaluated: tuple[int, float] | None = None
        """The last evaluation: its step, and its value of the metric."""
        self.best: Best | None = None
        own = settings.best_metric, settings.greater_is_better
        if settings.load_best_model_at_end and resumed:
            before = Best(**resumed)
            is_there = (folder / f"step_{before.step}").is_dir()
            self.best = before if is_there and (before.metric, before.greater_is_better) == own else None
        self._set_copy_aside()
        if self.best:
            self._point()
        else:
            for name in ("best", "best.json"):
                (folder / name).unlink(missing_ok=True)

    def evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation after training step `step`.

        Raises:
            ConfigError: the first one does not have the metric.
        """
        if not self.settings.load_best_model_at_end:
            return
        name = self.settings.best_metric
        if self.evaluated is None and name not in metrics:
            known = [metric for metric in metrics if metric.startswith("eval/")]
            near = difflib.get_close_matches(name, known, n=3) or known
            raise ConfigError([f"metric_for_best_model={name}: the evaluations of this run have {', '.join(near)}"])
        self.evaluated = step, float(metrics.get(name, math.nan))

    def export(self, step: int) -> None:
        """Record the export of step `step`, after its evaluation."""
        if self.evaluated is None or self.evaluated[0] != step or math.isnan(self.evaluated[1]):
            return
        value, sign = self.evaluated[1], 1 if self.settings.greater_is_better else -1
        if self.best is None or sign * value > sign * self.best.value:
            self.best = Best(
                step=step,
                metric=self.settings.best_metric,
                value=value,
                greater_is_better=self.settings.greater_is_better,
            )
            self._point()

    def state_dict(self) -> dict[str, Any]:
        """The best export in JSON; empty while there is none."""
        best = self.best
        return {name: getattr(best, name) for name in Best.__dataclass_fields__} if best else {}

    def _set_copy_aside(self) -> None:
        """Rename a model that stands where the link was, as after a copy that follows links: it would go stale."""
        copy = self.folder / "best"
        if copy.is_dir() and not copy.is_symlink():
            number = next(n for n in itertools.count(1) if not (self.folder / f"best_copy_{n}").exists())
            copy.rename(self.folder / f"best_copy_{number}")

    def _point(self) -> None:
        """Write the pointer and the link, each in one step: a reader finds the old one or the new one."""
        assert self.best is not None
        name = f"step_{self.best.step}"
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / "best.partial"
        partial.unlink(missing_ok=True)
        partial.write_text(json.dumps({"model": name, **self.state_dict()}) + "\n")
        os.replace(partial, self.folder / "best.json")
        # Not every file system has links.
        with suppress(OSError):
            partial.symlink_to(name)
            os.replace(partial, self.folder / "best")
