"""The losses that `policy_loss` names, one file each: `loss(inputs) -> PolicyLoss`, and a remark for the user.

A user's own loss is a function, see `mgrpo.algo.loss_inputs.LossFunction` and `own`.
"""

from mgrpo.algo.losses import cispo, ppo_clip, reinforce, sapo, vespo

NAMED = {"ppo_clip": ppo_clip, "cispo": cispo, "sapo": sapo, "vespo": vespo, "reinforce": reinforce}
