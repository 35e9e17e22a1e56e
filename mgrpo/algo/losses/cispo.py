"""CISPO, arXiv 2506.13585: the logprob l weighted by the bounded ratio, which has no gradient.

-A min(r, 1 + clip_higher) l, or with `cispo_two_sided` -A clip(r, 1 - clip_lower, 1 + clip_higher) l
"""

from __future__ import annotations

from mgrpo.algo.loss_inputs import LossInputs, PolicyLoss
from mgrpo.algo.surrogate import surrogate_loss

REMARK = ""


def loss(inputs: LossInputs) -> PolicyLoss:
    config = inputs.config
    ratio_low = 1.0 - config.clip_lower if config.cispo_two_sided else 0.0
    return surrogate_loss(inputs, "cispo", ratio_low=ratio_low, ratio_high=1.0 + config.clip_higher)
