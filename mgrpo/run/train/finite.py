"""Checks that the weights of the learners' models are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from mgrpo.config import ConfigError
from mgrpo.parallel.gather import gather_json
from mgrpo.policy.policy import Policy


def not_finite(model: Policy, group: dist.ProcessGroup) -> list[str]:
    """HF tensors with a value that is not finite on any rank, see `Policy.not_finite`. All ranks of `group` must call."""
    return sorted({name for names in gather_json(model.not_finite(), group) for name in names})


def check_loaded(model: Policy, place: str, group: dist.ProcessGroup) -> None:
    """Raise ConfigError on all ranks of `group`, which must call, if the weights loaded from `place` are not finite."""
    if names := not_finite(model, group):
        raise ConfigError(
            [f"{place}: {some(names)} not finite (NaN, infinite, or beyond 1e19); use weights without such values"]
        )


def some(names: Sequence[str]) -> str:
    """The beginning of a sentence: the first tensor and the number of the others."""
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} other tensors are"
