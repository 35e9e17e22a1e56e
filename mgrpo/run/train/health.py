"""Health of the training: ends a run that has diverged, and records if it has learned anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mgrpo.config import Config
from mgrpo.rollout.engine import NotFiniteError
from mgrpo.run.records import Learned
from mgrpo.run.train.finite import some
from mgrpo.run.train.resume import States

MAX_SKIPPED = 3
"""Steps in a row with a gradient that is not finite that end the run."""


class Health:
    """Divergence checks of one run. Every rank makes one, with equal results."""

    def __init__(self, config: Config, states: States) -> None:
        self.learning_rate, self.states = config.optimizer.learning_rate, states
        self.skipped = 0
        """Steps in a row with a gradient that is not finite, whatever the loss scale."""
        self.has_trained = False
        """True if a step had a gradient."""

    def check(self, learned: Learned, step: int) -> None:
        """Raise RuntimeError if weights are not finite after `step`, or gradients were not in `MAX_SKIPPED` steps in a row."""
        self.has_trained |= learned.has_learned
        if learned.not_finite:
            raise RuntimeError(
                f"the policy has diverged: {some(learned.not_finite)} not finite after step {step}; lower learning_rate="
                f"{self.learning_rate:g}; {self.states.last_good()}"
            )
        if learned.results:
            # A gradient that overflowed in float16 may be finite with the next, smaller loss scale.
            is_sound = all(result.is_finite or result.has_overflowed for result in learned.results)
            self.skipped = 0 if is_sound else self.skipped + 1
        if self.skipped >= MAX_SKIPPED:
            raise RuntimeError(
                f"{MAX_SKIPPED} steps in a row had a gradient that is not finite{_at_scale(learned)}, and were skipped; "
                f"lower learning_rate={self.learning_rate:g} or look at the rewards; {self.states.last_good()}"
            )

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Add the last good checkpoint to the error of engines whose outputs are not finite."""
        try:
            yield
        except NotFiniteError as err:
            raise RuntimeError(f"{err}; {self.states.last_good()}") from err


def _at_scale(learned: Learned) -> str:
    scale = learned.results[-1].loss_scale
    return "" if scale is None else f" even with loss scale {scale:g} (float16; model_dtype=bfloat16 has a wider range)"
