"""Weights & Biases: a run in the child, and a check that it can be used here. The WANDB_* environment variables work as usual."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PACKAGE = "wandb"
DEFAULT_PROJECT = "mgrpo"
NEEDS_NO_ACCOUNT = ("offline", "disabled")
_LOGIN_LIMIT_S = 60.0
_IS_READY = """
import sys, wandb
mode = wandb.setup().settings.mode
sys.exit(0 if mode in ("offline", "disabled") or wandb.login(prompt=False, verify=False) else 3)
"""
"""Program that exits with 3 if an account is needed and no user is logged in. Its process cannot prompt on the terminal."""


def problem() -> str | None:
    """Reason why no run can be recorded; None: it can. Takes a few seconds at most and uses no network."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "the package wandb is not installed; pip install wandb"
    if os.environ.get("WANDB_MODE") in NEEDS_NO_ACCOUNT or os.environ.get("WANDB_API_KEY"):
        return None
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _IS_READY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOGIN_LIMIT_S,
            start_new_session=True,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"wandb has not said within {_LOGIN_LIMIT_S:g} s whether anybody is logged in; set WANDB_MODE=offline"
    if asked.returncode == 3:
        return (
            "nobody is logged in; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to record on this machine "
            "and upload later"
        )
    if asked.returncode:
        return f"the package wandb does not work: {(asked.stderr.strip().splitlines() or ['no output'])[-1]}"
    return None


class WandbRun:
    """One run; see `tracker.TrackedRun`."""

    def __init__(
        self,
        *,
        folder: str,
        id: str,
        name: str,
        project: str | None,
        entity: str | None,
        group: str | None,
        config: dict[str, Any],
        tags: Sequence[str],
    ) -> None:
        """
        Args:
            folder: the folder in which wandb/ is made.
            id: the id of the run; an online run with this id is continued.
        """
        # The terminal is the run's.
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb, self.remark = wandb, ""
        options: dict[str, Any] = {
            "dir": folder,
            "id": os.environ.get("WANDB_RUN_ID") or id,
            "name": name,
            "project": project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            "entity": entity,
            "group": group,
            "config": config,
            "tags": list(tags),
            "resume": "allow",
            "settings": wandb.Settings(console="off"),
        }
        try:
            self._run = wandb.init(**options)
        except wandb.errors.Error as err:
            self.remark = f"recording offline, because the server cannot be used: {err}"
            # wandb's service still has the run.
            wandb.teardown()
            self._run = wandb.init(mode="offline", **options)
        settings = self._run.settings
        self._first = self._run.starting_step if self._run.resumed else 0
        if settings.mode == "disabled":
            self.where = "wandb disabled (WANDB_MODE)"
        elif settings.mode == "online":
            self.where = f"wandb    {self._run.url}"
        else:
            self.where = f"wandb    offline; upload it with: wandb sync {settings.sync_dir}"

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Record a step, unless the online run has it from before it was continued: its steps can only go up."""
        if step >= self._first:
            self._run.log(scalars, step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table of the step."""
        if step >= self._first:
            data = [list(row) for row in rows]
            table = self._wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)
            self._run.log({name: table}, step=step)

    def summary(self, values: dict[str, float]) -> None:
        """Add to the summary, which has the last value of each metric anyway."""
        self._run.summary.update(values)

    def close(self) -> None:
        """Upload remaining data, and end wandb's own processes."""
        self._run.finish()
        self._wandb.teardown()


open_run = WandbRun
