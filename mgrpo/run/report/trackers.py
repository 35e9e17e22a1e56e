"""Trackers of a run: checks before the start that they can be used, and the sinks that write to them."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from mgrpo.config import Config
from mgrpo.config.fields import flat
from mgrpo.config.tracking import EVERY, TRACKERS
from mgrpo.telemetry.trackers import trackio, wandb
from mgrpo.telemetry.trackers.process import Tracker
from mgrpo.telemetry.trackers.sinks import Sink
from mgrpo.telemetry.trackers.tensorboard import EventFile
from mgrpo.telemetry.versions import version_line

_log = logging.getLogger(__name__)

PROBLEM: dict[str, Callable[[], str | None]] = {"wandb": wandb.problem, "trackio": trackio.problem}


def tracker_problems(config: Config) -> Iterator[str]:
    """Problems with trackers that `report_to` names."""
    for name, problem in PROBLEM.items():
        if name in config.tracking.report_to and (why := problem()):
            yield f"report_to={name}: {why}, or leave {name} out of report_to"


def new_run_id() -> str:
    """A run's unique id for trackers; a continued run keeps it."""
    return secrets.token_hex(4)


def opened(
    config: Config,
    *,
    run_id: str,
    settings: str,
    resumed_after: int | None,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> Iterator[Sink]:
    """The sinks of `report_to`; none of them blocks.

    Args:
        settings: the configuration as text.
        resumed_after: the step after which the run is continued; None: a new run.
        say: called with each tracker's address.
        warn: called with the reason when the run goes on without a tracker.
    """
    own, folder = config.tracking, Path(config.experiment.output_dir)
    is_asked = own.asks_for
    if is_asked("tensorboard"):
        try:
            yield EventFile(folder / "tensorboard", resumed_after, settings=settings)
        except ImportError as err:
            _log.warning("no TensorBoard files: %s; pip install tensorboard", err)
    common: dict[str, object] = {
        "name": own.run_name or os.environ.get("WANDB_NAME") or config.experiment.run_name,
        "project": own.wandb_project,
        "group": own.wandb_group_name,
        "config": _values(config),
    }
    options: dict[str, dict[str, object]] = {
        "wandb": {
            "folder": str(folder),
            "id": run_id,
            "entity": own.wandb_entity,
            "tags": [config.experiment.exp_name, config.loss.policy_loss],
        },
        "trackio": {"folder": str(folder / "trackio"), "is_continued": resumed_after is not None},
    }
    for name in TRACKERS:
        # Trackers that `report_to` names have been checked.
        if name in options and (name in own.report_to or (EVERY in own.report_to and not PROBLEM[name]())):
            yield Tracker(name, common | options[name], say=say, warn=warn)


def _values(config: Config) -> dict[str, object]:
    """Every setting by name, and values derived from them."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in flat(config).items()}
    return {
        **values,
        "num_training_steps": config.num_training_steps,
        "batch_size": config.batch_size,
        "preset": config.provenance.preset,
        "versions": version_line(),
    }
