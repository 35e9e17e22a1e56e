"""Rewards that depend on the length of a completion."""

from __future__ import annotations

import numpy as np


def overlong_penalty(lengths: np.ndarray, *, max_length: int, cache_length: int) -> np.ndarray:
    """Soft overlong punishment, to be added to the rewards (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_length - cache_length tokens, from there linearly to -1 at max_length, -1 beyond.

    Args:
        lengths: tokens of each completion, any shape.
    Returns:
        float64, the shape of `lengths`.
    """
    if not 0 <= cache_length <= max_length:
        raise ValueError(f"cache_length={cache_length} must lie between 0 and max_length={max_length}")
    left = max_length - cache_length - np.asarray(lengths)
    if cache_length == 0:
        return np.where(left < 0, -1.0, 0.0)
    return np.clip(left / cache_length, -1.0, 0.0)
