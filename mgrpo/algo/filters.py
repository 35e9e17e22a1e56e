"""The groups without a learning signal, and the prompts that have been solved for good.

Pure functions over `[prompts, group]`, NaN for no score. Sampling others in their place, remembering the prompts to
leave out, and counting them is left to the callers.
"""

from __future__ import annotations

import numpy as np
import torch

from mgrpo.algo.advantage import has_zero_spread

# Ten times 0.1 / 10 is below 0.1 in floating point.
_SHARE_TOLERANCE = 1e-8


def has_spread(rewards: np.ndarray) -> np.ndarray:
    """`[prompts]` bool: groups whose scored rewards differ, by the tolerance that `advantages` has.

    The others, those without any score among them, would get advantage 0 throughout.
    """
    return ~has_zero_spread(torch.tensor(_two_dimensional(rewards))).numpy()


def solved_for_good(shares: np.ndarray, *, pass_rate: float) -> np.ndarray:
    """`[prompts]` bool: prompts never to be sampled again, whose mean share reaches `pass_rate`.

    Args:
        shares: rewards divided by the highest possible one, `[prompts, group]`. A prompt with a completion that has
            none is not solved for good: that completion may have been wrong.
    """
    return _two_dimensional(shares).mean(axis=1) >= pass_rate - _SHARE_TOLERANCE


def _two_dimensional(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 2:
        raise ValueError(f"groups must be [prompts, group], got shape {list(values.shape)}")
    return values
