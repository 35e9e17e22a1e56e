"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from mgrpo.config.schema import Optimizer


def learning_rate(settings: Optimizer, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then linear or cosine decay to 0 at `num_steps`, or constant."""
    warm_up = int(num_steps * settings.warmup_ratio) if settings.warmup_ratio > 0 else settings.warm_up_steps
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    left = 1 - (step - warm_up) / max(num_steps - warm_up, 1)
    match settings.lr_scheduler_type:
        case "constant":
            factor = 1.0
        case "linear":
            factor = left
        case "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return settings.learning_rate * max(factor, 0.0)
