"""PPO's clipped surrogate, arXiv 1707.06347, with A the advantage and r the ratio:

    -min(min(r, delta) A, clip(r, 1 - clip_lower, 1 + clip_higher) A), at most dual_clip |A| for A < 0

Two bounds: DAPO, arXiv 2503.14476; delta: INTELLECT-2, arXiv 2505.07291; dual clip: arXiv 1912.09729.
"""

from __future__ import annotations

from mgrpo.algo.loss_inputs import LossInputs, PolicyLoss
from mgrpo.algo.surrogate import surrogate_loss

REMARK = ""


def loss(inputs: LossInputs) -> PolicyLoss:
    config = inputs.config
    return surrogate_loss(
        inputs,
        "ppo_clip",
        ratio_low=1.0 - config.clip_lower,
        ratio_high=1.0 + config.clip_higher,
        delta=config.delta,
        dual_clip=config.dual_clip,
    )
