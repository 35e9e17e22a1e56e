"""What the files in a run's folder say, read once for a page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgrpo.telemetry.report.course import metric_points
from mgrpo.telemetry.samples import Record, read_records
from mgrpo.telemetry.state import ENGINES, STATUS, read_status

LOCK = "run.lock"
"""In the folder from the start of a run to its end, and touched every 15 seconds."""
LOST_S = 60.0
"""Seconds without a touch after which a run has ended without saying so."""
FOLLOWED = ("config.yaml", "metrics.jsonl", STATUS, ENGINES, "rollouts")
"""What a page is made of."""
STATES = {
    "waiting": "waiting for a run",
    "starting": "starting",
    "running": "running",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "ended by an error",
    "lost": "no sign of life",
    "ended": "ended",
}
"""States of a run in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One run's metrics, settings and state."""

    folder: Path
    config: str
    settings: Mapping[str, Any]
    steps: Sequence[Record]
    """Training steps in their order."""
    evaluations: Sequence[Record]
    engines: Sequence[Record]
    """States of all engines after a step, where they differ from those before."""
    state: str
    """See `STATES`."""
    cause: str
    """Why it ended, where that is known."""

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """The run in a folder.

        Raises:
            ValueError: there is none.
        """
        metrics = folder / "metrics.jsonl"
        if not metrics.is_file():
            raise ValueError(f"{folder} holds no metrics.jsonl; give the output_dir of a run")
        lines = [line for line in read_records([metrics]) if isinstance(line, dict)]
        config_path, engines_path = folder / "config.yaml", folder / ENGINES
        config = config_path.read_text(encoding="utf-8", errors="replace") if config_path.is_file() else ""
        state, cause = state_of(folder)
        evaluations = [line for line in lines if any(name.startswith("eval/") for name in line)]
        return cls(
            folder=folder,
            config=config,
            settings=_settings(config),
            steps=[line for line in lines if not any(name.startswith("eval/") for name in line)],
            evaluations=evaluations,
            engines=list(read_records([engines_path])) if engines_path.is_file() else [],
            state=state,
            cause=cause,
        )

    @property
    def title(self) -> str:
        """Its name."""
        return str(self.settings.get("exp_name") or self.name)

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.folder.absolute().name

    @property
    def step(self) -> int:
        """The newest training step; 0 before the first."""
        return max((line["step"] for line in self.steps if isinstance(line.get("step"), int)), default=0)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; 0 where the settings do not say."""
        names = ("total_episodes", "num_unique_prompts_rollout", "num_samples_per_prompt_rollout")
        episodes, prompts, samples = (
            number if isinstance(number := self.settings.get(name), int) else 0 for name in names
        )
        return episodes // (prompts * samples) if prompts * samples > 0 else 0

    @property
    def state_words(self) -> str:
        """Its state for readers."""
        return "evaluation" if self.is_over and self.evaluations and not self.steps else STATES[self.state]

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state not in ("waiting", "starting", "running")

    def times(self) -> list[float]:
        """When its lines were written, since 1970; the first and the last."""
        times = [t for line in (*self.steps, *self.evaluations) if isinstance(t := line.get("time/unix"), (int, float))]
        return [min(times), max(times)] if times else []

    def remaining_s(self) -> float | None:
        """Seconds left at the pace of the last steps, evaluations included; None where that cannot be told."""
        left = self.num_steps - self.step
        newest = metric_points(self.steps[-30:], "time/unix")
        if self.is_over or left <= 0 or not newest:
            return None
        (first, began), (last, ended) = newest[0], newest[-1]
        if last > first:
            return max(0.0, (ended - began) / (last - first) * left - (time.time() - ended))
        seconds = self.steps[-1].get("time/total")
        return seconds * left if isinstance(seconds, (int, float)) else None


def state_of(folder: Path) -> tuple[str, str]:
    """The state of the run in a folder, and why it ended."""
    status = read_status(folder)
    lock = folder / LOCK
    age = time.time() - lock.stat().st_mtime if lock.exists() else None
    has_metrics = (folder / "metrics.jsonl").is_file()
    if status is None:
        if age is not None and age < LOST_S:
            return ("running" if has_metrics else "starting"), ""
        return ("ended" if has_metrics else "waiting"), ""
    if status["state"] != "running":
        return status["state"], status["cause"]
    if age is None or age >= LOST_S:
        return "lost", "the process has ended without saying so: it was killed, or its machine is gone"
    return "running", ""


def _settings(config: str) -> Mapping[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(config)
    except yaml.YAMLError:
        return {}
    return settings if isinstance(settings, dict) else {}
