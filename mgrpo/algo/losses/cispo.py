"""CISPO, arXiv 2506.13585: the logprob l weighted by the capped ratio, which has no gradient.

-A min(r, 1 + clip_higher) l
"""

from __future__ import annotations

from mgrpo.algo.loss_inputs import LossInputs, PolicyLoss
from mgrpo.algo.surrogate import surrogate_loss

REMARK = ""


def loss(inputs: LossInputs) -> PolicyLoss:
    return surrogate_loss(inputs, "cispo", clip_high=1.0 + inputs.config.clip_higher)
