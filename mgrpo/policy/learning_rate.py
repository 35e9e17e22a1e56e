"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from mgrpo.config.schema import Optimizer

POLYNOMIAL_END = 1e-7
"""Final rate of the polynomial schedule, of power 1, without a minimum. This and one cycle of cosine_with_restarts are transformers' defaults."""


def learning_rate(settings: Optimizer, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (from 0) of `num_steps`: linear warm-up, then the schedule; "constant" has neither.

    The first step of a warm-up of w steps has 1/w of the rate; with transformers' schedules it would have a rate of 0.
    """
    kind, peak, end = settings.lr_scheduler_type, settings.learning_rate, settings.min_lr
    warm_up = int(num_steps * settings.warmup_ratio) if settings.warmup_ratio > 0 else settings.warm_up_steps
    if kind == "constant":
        return peak
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = min((step - warm_up) / max(num_steps - warm_up, 1), 1.0)
    match kind:
        case "constant_with_warmup":
            return peak
        case "linear":
            return (peak - end) * (1 - done) + end
        case "cosine" | "cosine_with_restarts" | "cosine_with_min_lr":
            return (peak - end) * 0.5 * (1 + math.cos(math.pi * done)) + end
        case "polynomial":
            end = end or min(POLYNOMIAL_END, peak)
            return (peak - end) * (1 - done) + end
    raise ValueError(f"lr_scheduler_type={kind!r} is unknown")
