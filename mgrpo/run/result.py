"""The outcome of a run and of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The outcome of a run."""

    output_dir: Path
    steps: int
    before: dict[str, float]
    """Metrics of the evaluation before training; empty without held-out data, and on ranks other than 0."""
    after: dict[str, float]
    """The same after training."""
    exported: Path | None
    """Folder of the trained model in Hugging Face format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The outcome of `mgrpo eval`."""

    output_dir: Path
    """Where metrics.jsonl, rollouts/ and report.html are."""
    metrics: dict[str, float]
