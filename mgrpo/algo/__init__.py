"""The mathematics of GRPO on plain tensors: advantages, filters, KL penalty, losses, entropy, and their metrics.

Owns formulas only. Ranks, reductions, micro-batches and files belong to the callers: sums and a denominator leave this
room, so that the result does not depend on the division of tokens.
"""

from mgrpo.algo.advantage import advantages
from mgrpo.algo.aggregation import denominators, loss_denominator
from mgrpo.algo.agreement import agreement
from mgrpo.algo.credit.own_advantages import AdvantageFunction, AdvantageGroup, check_advantages, load_advantages
from mgrpo.algo.distillation import TeacherSignal
from mgrpo.algo.entropy import AdaptiveEntropy, entropy_bonus, entropy_threshold, top_entropy_keep
from mgrpo.algo.filters import has_spread, solved_for_good
from mgrpo.algo.kl import kl_penalty
from mgrpo.algo.loss import policy_loss
from mgrpo.algo.loss_inputs import LossFunction, LossInputs, PolicyLoss
from mgrpo.algo.loss_metrics import MetricSums, add_metrics, metric_sums, reduce_metrics
from mgrpo.algo.losses.own import load_loss, loss_problems, loss_remarks
from mgrpo.config.loss import LossConfig

__all__ = [
    "AdaptiveEntropy",
    "AdvantageFunction",
    "AdvantageGroup",
    "LossConfig",
    "LossFunction",
    "LossInputs",
    "MetricSums",
    "PolicyLoss",
    "TeacherSignal",
    "add_metrics",
    "advantages",
    "agreement",
    "check_advantages",
    "denominators",
    "entropy_bonus",
    "entropy_threshold",
    "has_spread",
    "kl_penalty",
    "load_advantages",
    "load_loss",
    "loss_denominator",
    "loss_problems",
    "loss_remarks",
    "metric_sums",
    "policy_loss",
    "reduce_metrics",
    "solved_for_good",
    "top_entropy_keep",
]
