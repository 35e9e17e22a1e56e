"""The mathematics of GRPO on plain tensors: advantages, filters, KL penalty, policy loss, entropy, and their metrics.

Owns formulas only. Ranks, reductions, micro-batches and files belong to the callers: a sum and a denominator leave this
room, so that the result does not depend on how the tokens were cut up.
"""

from mgrpo.algo.advantage import advantages
from mgrpo.algo.entropy import AdaptiveEntropy, entropy_bonus, entropy_threshold, top_entropy_keep
from mgrpo.algo.filters import has_spread, solved_for_good
from mgrpo.algo.kl import kl_penalty
from mgrpo.algo.loss import PolicyLoss, loss_denominator, policy_loss
from mgrpo.algo.metrics import maxima_names, metric_names, reduce_metrics
from mgrpo.config.loss import LossConfig

__all__ = [
    "AdaptiveEntropy",
    "LossConfig",
    "PolicyLoss",
    "advantages",
    "entropy_bonus",
    "entropy_threshold",
    "has_spread",
    "kl_penalty",
    "loss_denominator",
    "maxima_names",
    "metric_names",
    "policy_loss",
    "reduce_metrics",
    "solved_for_good",
    "top_entropy_keep",
]
