"""A custom policy loss: a clip without a corner.

PPO multiplies the advantage A by the ratio r = exp(l - l_old) of a token's probabilities and stops the gradient at once
where r leaves [1 - clip_lower, 1 + clip_higher]. Here r is replaced by

    s(r) = exp(c tanh(log r / c)),  c = log(1 + clip_higher) above r = 1 and -log(1 - clip_lower) below

which lies between the same two bounds, touches r at r = 1, and has the gradient s(r) (1 - tanh^2): full strength at
r = 1, fading out as s(r) approaches its bound. As in PPO the loss is the worse of the two for the policy,

    -min(r A, s(r) A)

so that a token that moved the wrong way is pulled back at full strength.
"""

import math

import torch
from torch import Tensor

from mgrpo.algo import LossInputs


def smooth_clip(inputs: LossInputs) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The loss of one micro-batch, and the mean of s(r) and of the share of the gradient that is left."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    above, below = math.log(1 + inputs.config.clip_higher), -math.log(1 - inputs.config.clip_lower)
    bound = torch.where(log_ratio > 0, log_ratio.new_tensor(above), log_ratio.new_tensor(below))
    faded = torch.tanh(log_ratio / bound)
    ratio, smooth = log_ratio.exp(), (bound * faded).exp()
    losses = -torch.minimum(ratio * inputs.advantages, smooth * inputs.advantages)
    return inputs.total(losses), {
        "smooth_ratio": inputs.measured(smooth),
        "gradient_left": inputs.measured(1 - faded.square()),
    }
