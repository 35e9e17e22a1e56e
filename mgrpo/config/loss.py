"""Settings of `mgrpo.algo.policy_loss`: independent axes, from which every named loss of the field is put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["token", "sequence_mean", "sequence_sum"]
"""Where the ratio of trainer to engine is taken: at each token, or exp of the mean or of the sum over a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Settings of `mgrpo.algo.policy_loss`. Formulas: its docstring."""

    policy_loss: Literal["ppo_clip", "cispo", "sapo", "vespo", "reinforce"] = "ppo_clip"
    """The surrogate."""
    ratio_level: Literal["token", "sequence", "sequence_token"] = "token"
    """token: a ratio each; sequence: one for the sequence (GSPO); sequence_token: its value, the token's own gradient."""
    aggregation: Literal["token", "constant", "seq_mean", "local_token", "dr_grpo", "luspo"] = "token"
    """What the sum over tokens is divided by, see `mgrpo.algo.loss_denominator`."""
    constant: float | None = None
    """The divisor of aggregation "constant"; the longest completion for "dr_grpo"."""
    clip_lower: float = 0.2
    """The ratio is clipped below at 1 - clip_lower."""
    clip_higher: float = 0.2
    """The ratio is clipped above at 1 + clip_higher."""
    delta: float | None = None
    """Two-sided clip: the unclipped ratio goes no higher than this, which bounds the loss of bad tokens."""
    dual_clip: float | None = None
    """Dual clip: the loss of a token with advantage A < 0 is at most dual_clip x |A|."""
    sapo_temperature_pos: float = 1.0
    """SAPO's gate for positive advantages."""
    sapo_temperature_neg: float = 1.05
    """SAPO's gate for the others."""
    vespo_k_pos: float = 2.0
    """VESPO's exponent of the sequence ratio, advantage >= 0."""
    vespo_lambda_pos: float = 3.0
    """VESPO's decay, advantage >= 0."""
    vespo_k_neg: float = 3.0
    """VESPO's exponent of the sequence ratio, advantage < 0."""
    vespo_lambda_neg: float = 2.0
    """VESPO's decay, advantage < 0."""
    beta: float = 0.0
    """Weight of the KL penalty."""
    kl_estimator: Literal[0, 1, 2, 3] = 2
    """See `mgrpo.algo.kl_penalty`."""
    kl_bias_correction: bool = False
    """Multiply the KL estimate by the ratio, through which gradients flow too."""
    use_rho_correction: bool = False
    """Weigh the policy term by rho = exp(old logprob - rollout logprob), bounded as the fields below say."""
    rho_level: Level = "token"
    """Level of the rho that weighs."""
    rho_clamp_lower: float = 0.0
    """Smallest weight; 0 is off."""
    rho_clamp_upper: float = 0.0
    """Largest weight; 0 is off."""
    rho_mask_level: Level = "token"
    """Level of the rho that decides what is dropped."""
    rho_mask_lower: float = 0.0
    """Below this the policy term is dropped; 0 is off."""
    rho_mask_upper: float = 0.0
    """Above this the policy term is dropped; 0 is off."""
    rho_mask_tv: bool = False
    """Compare rho_mask_upper with the sequence's mean of |rho - 1|; drop only tokens whose step would raise it (VACO)."""
    off_policy_mask_threshold: float | None = None
    """Drop sequences with advantage < 0 whose mean of rollout - present logprob is above this (DeepSeek-V3.2, eq. 9)."""

    @property
    def rho_bounds(self) -> tuple[float, float, float, float]:
        """Clamp below and above, mask below and above; 0 is off."""
        return self.rho_clamp_lower, self.rho_clamp_upper, self.rho_mask_lower, self.rho_mask_upper
