"""trackio: a run in the child, and a check that it can be used here. The TRACKIO_* environment variables work as usual."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

PACKAGE = "trackio"
DEFAULT_PROJECT = "mgrpo"


def problem() -> str | None:
    """Reason why no run can be recorded; None: it can."""
    found = importlib.util.find_spec(PACKAGE) is not None
    return None if found else "the package trackio is not installed; pip install trackio"


class TrackioRun:
    """One run; see `tracker.TrackedRun`."""

    remark = ""

    def __init__(
        self,
        *,
        folder: str,
        name: str,
        project: str | None,
        group: str | None,
        config: dict[str, Any],
        is_continued: bool,
    ) -> None:
        """
        Args:
            folder: the folder of trackio's database, unless TRACKIO_DIR names one.
            is_continued: True continues the newest run of this name.
        """
        place = os.environ.setdefault("TRACKIO_DIR", folder)
        import trackio

        project = project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT
        resume = "allow" if is_continued else "never"
        self._trackio = trackio
        # Suppress trackio's output: the terminal is the run's.
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(project=project, name=name, group=group, config=config, resume=resume, embed=False)
        self._first = getattr(self._run, "_next_step", 0) if is_continued else 0
        self.where = f"trackio  TRACKIO_DIR={place} trackio show --project {project}"

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Record a step, unless it was recorded before the run was continued: the run repeats such steps."""
        if step >= self._first:
            self._run.log(scalars, step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Do nothing: trackio renders cells as Markdown, in which a model's text could load external pages."""

    def summary(self, values: dict[str, float]) -> None:
        """Do nothing: trackio has no summary."""

    def close(self) -> None:
        """Write remaining data."""
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()


open_run = TrackioRun
