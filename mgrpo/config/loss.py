"""The loss section of the configuration: independent axes that every named loss is a combination of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from mgrpo.config.annotations import BELOW_ONE, NOT_NEGATIVE, ONE_OR_MORE, OPEN_INSTRUCT, POSITIVE, TRL, Range

Aggregation = Literal["token", "constant", "seq_mean", "local_token", "dr_grpo", "luspo"]
NamedLoss = Literal["ppo_clip", "cispo", "sapo", "vespo", "reinforce"]
NAMED_LOSSES: tuple[str, ...] = get_args(NamedLoss)
Level = Literal["token", "sequence_mean", "sequence_sum"]
"""Where the ratio of trainer to engine is computed: per token, or as exp of the mean or sum over a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Settings of `mgrpo.algo.policy_loss`. Formulas: its docstring."""

    policy_loss: NamedLoss | str = "ppo_clip"
    """ppo_clip: clipped ratio; cispo: capped weight; sapo: soft gate; vespo: sequence gate; reinforce: no ratio; or your own,
    file.py:function or package.module:function."""
    ratio_level: Literal["token", "sequence", "sequence_token"] = "token"
    """token: one ratio per token; sequence: one per completion (GSPO); sequence_token: its value with each token's gradient."""
    aggregation: Aggregation | None = None
    """What the sum over tokens is divided by; none: token or constant, as loss_denominator says."""
    loss_denominator: Annotated[str, OPEN_INSTRUCT] = "token"
    """token: mean over the response tokens of the mini-batch; a number: divide the sum by it (Dr. GRPO)."""
    local_batch_size: Annotated[int, ONE_OR_MORE] = 8
    """With aggregation local_token: completions in one mean over tokens, however they are packed."""
    clip_lower: Annotated[float, BELOW_ONE, OPEN_INSTRUCT] = 0.2
    """The ratio is clipped below at 1 - clip_lower."""
    clip_higher: Annotated[float, POSITIVE, OPEN_INSTRUCT] = 0.2
    """The ratio is clipped above at 1 + clip_higher, which is also CISPO's cap."""
    delta: Annotated[float | None, POSITIVE, TRL] = None
    """Two-sided clip: upper bound of the unclipped ratio."""
    dual_clip: Annotated[float | None, Range(low=1, low_open=True)] = None
    """Dual clip: the loss of a token with advantage A < 0 is at most dual_clip x |A|."""
    sapo_temperature_pos: Annotated[float, POSITIVE, TRL] = 1.0
    """SAPO's temperature where the advantage is above 0."""
    sapo_temperature_neg: Annotated[float, POSITIVE, TRL] = 1.05
    """SAPO's temperature elsewhere."""
    vespo_k_pos: Annotated[float, NOT_NEGATIVE, TRL] = 2.0
    """VESPO's exponent of the sequence ratio, advantage >= 0."""
    vespo_lambda_pos: Annotated[float, NOT_NEGATIVE, TRL] = 3.0
    """VESPO's decay, advantage >= 0."""
    vespo_k_neg: Annotated[float, NOT_NEGATIVE, TRL] = 3.0
    """VESPO's exponent of the sequence ratio, advantage < 0."""
    vespo_lambda_neg: Annotated[float, NOT_NEGATIVE, TRL] = 2.0
    """VESPO's decay, advantage < 0."""
    beta: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT, TRL] = 0.05
    """Weight of the KL penalty towards the reference model; 0: no reference is loaded unless log_ref_kl is set."""
    kl_estimator: Annotated[Literal[0, 1, 2, 3], OPEN_INSTRUCT] = 2
    """0: d; 1: d^2/2; 2: exp(-d) - 1 + d; 3: ratio x d, where d = logprob - reference logprob."""
    kl_bias_correction: bool = False
    """Multiply the KL estimate by the ratio, including its gradient."""
    use_rho_correction: Annotated[bool, OPEN_INSTRUCT] = False
    """Multiply the policy loss by rho = exp(old logprob - engine's logprob), bounded by the rho settings."""
    rho_level: Level = "token"
    """Level of the rho that multiplies: token, or exp of the mean or of the sum over the completion."""
    rho_clamp_lower_bound: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT] = 0.0
    """Smallest rho that multiplies; 0: no bound."""
    rho_clamp_upper_bound: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT] = 2.0
    """Largest rho that multiplies (truncated importance sampling); 0: no bound."""
    rho_mask_level: Level = "token"
    """Level of the rho that decides what is dropped."""
    rho_mask_lower_bound: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT] = 0.0
    """The policy loss is dropped where rho is below this; 0: no bound."""
    rho_mask_upper_bound: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT] = 0.0
    """The policy loss is dropped where rho is above this; 0: no bound."""
    rho_mask_tv_divergence: Annotated[bool, OPEN_INSTRUCT] = False
    """Compare the upper bound with the completion's mean |rho - 1| and drop only tokens whose update would raise it."""
    off_policy_mask_threshold: Annotated[float | None, NOT_NEGATIVE, TRL] = None
    """Drop completions with advantage < 0 whose mean of engine's minus current logprob is above this; none: off."""

    @property
    def is_own_function(self) -> bool:
        """Whether `policy_loss` names a user's function, `module:function`."""
        module, _, name = self.policy_loss.rpartition(":")
        return bool(module and name)

    @property
    def effective_aggregation(self) -> Aggregation:
        """`aggregation`, or what `loss_denominator` implies."""
        return self.aggregation or ("token" if self.loss_denominator == "token" else "constant")

    @property
    def constant(self) -> float | None:
        """The number in `loss_denominator`; None where it is "token"."""
        return None if self.loss_denominator == "token" else float(self.loss_denominator)
