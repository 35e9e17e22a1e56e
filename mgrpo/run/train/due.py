"""What is due after which training step."""

from __future__ import annotations

from mgrpo.config import Config


def is_due(step: int, every: int) -> bool:
    """Whether `step` is one of every so many; never for 0 or less."""
    return every > 0 and step % every == 0


def evaluates_after(config: Config, step: int) -> bool:
    """Whether an evaluation follows training step `step`; the one after training is not counted."""
    return is_due(step, config.experiment.local_eval_every) and step < config.num_training_steps
