"""Metrics of cut sampling: how large the sets are that tokens were sampled from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mgrpo.types import ScoredGroup


def kept_metrics(groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """Over every sampled token of completions that have sets; empty where none has."""
    completions = [completion for group in groups for completion in group.group.completions]
    sizes = [c.kept.sizes[c.loss_mask] for c in completions if c.kept is not None]
    if not sizes:
        return {}
    every = np.concatenate(sizes)
    known = every[every > 0]
    return {
        "rollout/kept_tokens_avg": _mean(known),
        "rollout/kept_single_share": _mean(known == 1),
        "rollout/kept_unknown_share": _mean(every == 0),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
