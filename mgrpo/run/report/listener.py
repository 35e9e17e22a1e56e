"""Callbacks of a running training, and a way to stop it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mgrpo.config import Config
    from mgrpo.run.records import Evaluation, Rollouts
    from mgrpo.run.report.best import Best


class RunListener:
    """Callbacks of a run; override those that you need. Here they do nothing.

    They are called on rank 0 in the main thread, after the run's own files have been written, and block the run. Other ranks
    time out when rank 0 takes a minute; an error ends the run.
    """

    wants_end = False
    """Set to True to make the present step the last one: evaluation and export follow as after the last
    step, unless they were due after this one."""

    def begin(self, config: Config, *, done: int) -> None:
        """Called when the engines have the weights and training begins.

        Args:
            config: the configuration as it is run, with its length.
            done: training steps of the state that the run continues; 0: a new run.
        """

    def step(self, step: int, metrics: Mapping[str, float | list[int]], rollouts: Rollouts) -> None:
        """Called after training step `step`.

        Args:
            metrics: its line of metrics.jsonl, docs/metrics.md.
            rollouts: the groups sampled for it, with their scores.
        """

    def evaluation(self, step: int, metrics: Mapping[str, float], evaluation: Evaluation) -> None:
        """Called after an evaluation of the weights after `step` training steps."""

    def exported(self, step: int, folder: Path, best: Best | None) -> None:
        """Called when the model after `step` training steps is in `folder`; `best`: the best export so far, if the run selects one."""
