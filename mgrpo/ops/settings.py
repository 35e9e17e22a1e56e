"""The positions that Python and csrc/core/policy_loss.h share: the settings of a loss, and the columns of its sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

SURROGATES = ("ppo_clip", "cispo", "reinforce")
"""Surrogates that the extension computes; order as `Surrogate` in csrc/core/policy_loss.h."""
RATIO_LEVELS = ("token", "sequence", "sequence_token")
"""Order as `RatioLevel` in csrc/core/policy_loss.h."""
COLUMNS = (
    "loss",
    "count",
    "policy",
    "penalty",
    "ratio",
    "ratio_deviation",
    "approx_kl",
    "clipped_low",
    "clipped_high",
    "bounded",
    "kl0",
    "kl1",
    "kl2",
    "kl3",
    "rho",
    "rho_clamped",
    "rho_dropped_low",
    "rho_dropped_high",
    "known_rollout",
    "mismatch",
    "mismatch_square",
    "mismatch_tail",
    "rollout_kl",
    "mismatch_max",
)
"""The sums of `policy_loss` for each sequence; order and meaning as `Column` in csrc/core/policy_loss.h."""

SurrogateFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(ratio, logprobs, advantages), each `[tokens]` -> loss `[tokens]`; gradients flow through ratio and logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Settings of `mgrpo.ops.policy_loss`; fields and order as MGRPO_POLICY_SETTINGS in csrc/core/policy_loss.h."""

    surrogate: str | SurrogateFunction
    """One of SURROGATES, or a function in PyTorch, with which the reference computes the whole loss."""
    ratio_level: str
    """One of RATIO_LEVELS."""
    ratio_low: float
    """Smallest ratio that is not clipped; 0 is off."""
    ratio_high: float
    """Largest ratio that is not clipped."""
    delta: float
    """Bound of the unclipped ratio; 0 is off."""
    dual_clip: float
    """Bound of the loss of a token with advantage A < 0, in units of |A|; 0 is off."""
    beta: float
    """Weight of the KL penalty."""
    kl_estimator: int
    """0 to 3, see `mgrpo.algo.kl`."""
    kl_bias_correction: bool
    """True if the KL estimate is multiplied by the ratio."""
    use_rho: bool
    """True if the policy term is multiplied by rho; the bounds below, of which 0 is off, then apply."""
    rho_clamp_low: float
    rho_clamp_high: float
    rho_mask_low: float
    rho_mask_high: float

    def __post_init__(self) -> None:
        if not callable(self.surrogate) and self.surrogate not in SURROGATES:
            raise ValueError(f"surrogate={self.surrogate!r} is unknown; choose one of {', '.join(SURROGATES)}")
        if self.ratio_level not in RATIO_LEVELS:
            raise ValueError(f"ratio_level={self.ratio_level!r} is unknown; choose one of {', '.join(RATIO_LEVELS)}")

    def numbers(self) -> list[float]:
        """The settings as the compiled op takes them."""
        codes = {"surrogate": SURROGATES.index(self.surrogate), "ratio_level": RATIO_LEVELS.index(self.ratio_level)}
        return [float(codes[name] if name in codes else getattr(self, name)) for name in SETTINGS]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> LossSettings:
        """The settings whose `numbers` these are."""
        named: dict[str, Any] = dict(zip(SETTINGS, numbers, strict=True))
        named["surrogate"] = SURROGATES[int(named["surrogate"])]
        named["ratio_level"] = RATIO_LEVELS[int(named["ratio_level"])]
        named["kl_estimator"] = int(named["kl_estimator"])
        return cls(**named | {name: bool(named[name]) for name in ("kl_bias_correction", "use_rho")})


SETTINGS = tuple(field.name for field in fields(LossSettings))
