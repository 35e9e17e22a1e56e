"""A run as the files in its folder record it, read once for a page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgrpo.telemetry.recorded import Record, Unread, is_engine_states, is_metrics, read_records
from mgrpo.telemetry.report.course import metric_points
from mgrpo.telemetry.state import ENGINES, STATUS, read_status

LOCK = "run.lock"
"""A file that is in the folder from the start of a run to its end, and is touched every 5 seconds."""
LOST_S = 60.0
"""A run whose lock has not been touched for this many seconds has ended without recording it."""
LATEST = 1e11
"""Seconds since 1970 before which a line may have been written, some 3000 years from then."""
FOLLOWED = ("config.yaml", "metrics.jsonl", STATUS, ENGINES, "rollouts")
"""The files that a page is made from."""
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
"""The states of a run, and the words for them on a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One run's metrics, settings and state."""

    folder: Path
    config: str
    settings: Mapping[str, Any]
    steps: Sequence[Record]
    """The lines of training steps in their order."""
    evaluations: Sequence[Record]
    engines: Sequence[Record]
    """The lines of engines.jsonl: `mgrpo.telemetry.state.told_engines` gives the engines of each."""
    state: str
    """A key of `STATES`."""
    cause: str
    """Reason of the run's end, if known."""
    unread: Unread = field(default_factory=Unread)
    """Lines that could not be read, by file; readers of further files add theirs."""

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Read the run in a folder.

        Raises:
            ValueError: the folder has no metrics.jsonl.
        """
        metrics = folder / "metrics.jsonl"
        if not metrics.is_file():
            raise ValueError(f"{folder} holds no metrics.jsonl; give the output_dir of a run")
        unread = Unread()
        lines = list(read_records([metrics], is_metrics, unread))
        config_path, engines_path = folder / "config.yaml", folder / ENGINES
        config = config_path.read_text(encoding="utf-8", errors="replace") if config_path.is_file() else ""
        state, cause = state_of(folder)
        unread[STATUS] += (folder / STATUS).is_file() and read_status(folder) is None
        evaluations = [line for line in lines if any(name.startswith("eval/") for name in line)]
        return cls(
            folder=folder,
            config=config,
            settings=_settings(config, unread),
            steps=[line for line in lines if not any(name.startswith("eval/") for name in line)],
            evaluations=evaluations,
            engines=list(read_records([engines_path], is_engine_states, unread)) if engines_path.is_file() else [],
            state=state,
            cause=cause,
            unread=unread,
        )

    @property
    def title(self) -> str:
        """The name of the experiment, or that of the folder."""
        return str(self.settings.get("exp_name") or self.name)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.absolute().name

    @property
    def step(self) -> int:
        """The newest training step; 0 before the first."""
        return max((line["step"] for line in self.steps if isinstance(line.get("step"), int)), default=0)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run by its settings; 0: unknown."""
        names = ("total_episodes", "num_unique_prompts_rollout", "num_samples_per_prompt_rollout")
        episodes, prompts, samples = (
            number if isinstance(number := self.settings.get(name), int) else 0 for name in names
        )
        return episodes // (prompts * samples) if prompts * samples > 0 else 0

    @property
    def state_words(self) -> str:
        """The state in words."""
        return "evaluation" if self.is_over and self.evaluations and not self.steps else STATES[self.state]

    @property
    def is_over(self) -> bool:
        """True if the run has ended, for any reason."""
        return self.state not in ("waiting", "starting", "running")

    def times(self) -> list[float]:
        """The times of the first and the last line, in seconds since 1970; empty without lines."""
        lines = (*self.steps, *self.evaluations)
        times = [t for line in lines if isinstance(t := line.get("time/unix"), (int, float)) and 0 <= t < LATEST]
        return [min(times), max(times)] if times else []

    def remaining_s(self) -> float | None:
        """Seconds left at the pace of the last steps, evaluations included; None: unknown."""
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
    """The state of the run in a folder, a key of `STATES`, and the reason for its end."""
    status = read_status(folder)
    lock = folder / LOCK
    # A touch in the future also counts as old: the clock was set back since.
    age = abs(time.time() - lock.stat().st_mtime) if lock.exists() else None
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


def _settings(config: str, unread: Unread) -> Mapping[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(config)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        settings = ""
    if not isinstance(settings, dict):
        unread["config.yaml"] += bool(config)
        return {}
    return {str(name): value for name, value in settings.items()}
