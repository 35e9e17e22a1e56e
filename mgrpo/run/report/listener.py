"""What a program that calls `mgrpo.train` may hear of a run while it goes on, and how it may end it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mgrpo.config import Config
    from mgrpo.run.records import Evaluation, Rollouts
    from mgrpo.run.report.best import Best


class RunListener:
    """Override the methods of what you want to hear; here they do nothing.

    They are called on rank 0 in the main thread, after the run's own files have been written, and the run waits for them.
    Other ranks give up on rank 0 when it takes a minute; an error ends the run.
    """

    wants_end = False
    """Set it to true, and the present step is the last one: evaluation and export follow as after the last
    step, unless they were due after this one."""

    def begin(self, config: Config, *, done: int) -> None:
        """The engines have the weights, and training begins.

        Args:
            config: the configuration as it is run, with its length.
            done: training steps of the state that the run continues; 0: a new run.
        """

    def step(self, step: int, metrics: Mapping[str, float | list[int]], rollouts: Rollouts) -> None:
        """Training step `step` is done.

        Args:
            metrics: its line of metrics.jsonl, docs/metrics.md.
            rollouts: what was sampled for it, with the scores.
        """

    def evaluation(self, step: int, metrics: Mapping[str, float], evaluation: Evaluation) -> None:
        """The held-out prompts have been sampled with the weights after `step` training steps."""

    def exported(self, step: int, folder: Path, best: Best | None) -> None:
        """The model after `step` training steps is in `folder`; `best` is the best export so far, if one is looked for."""
