"""A user's loss on the ranks of a distributed test, beside the named one that it repeats."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgrpo import packing
from mgrpo.algo import LossInputs
from mgrpo.config.derived import layout_of
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.moving import from_values
from mgrpo.types import TrainSample
from tests.ranks.cases import forget_groups

NAMED, OWN = "ppo_clip", "tests.ranks.own_losses:clipped"


def clipped(inputs: LossInputs) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """ppo_clip's formula, and metrics of which one is missing where no token is good."""
    a, config = inputs.advantages, inputs.config
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    losses = -torch.minimum(ratio * a, ratio.clamp(1 - config.clip_lower, 1 + config.clip_higher) * a)
    metrics = {"ratio": inputs.measured(ratio), "loss": inputs.measured(losses)}
    is_good = inputs.loss_mask & (a > 0)
    if is_good.any():
        metrics["good_ratio"] = ratio.detach()[is_good].sum(), is_good.sum()
    return inputs.total(losses), metrics


def both(model_dir: str, settings: dict[str, Any], samples: list[TrainSample]) -> dict[str, Any]:
    """One mini-batch with the named loss and with its copy: metrics of each, and how far their gradients differ."""
    from mgrpo.run.train.learner import Learner

    forget_groups()
    host_group = dist.new_group(backend="gloo")
    shape = shape_of(read_hf_config(model_dir))
    metrics, gradients = {}, {}
    for loss in (NAMED, OWN):
        config = from_values(
            settings | {"policy_loss": loss, "model_name_or_path": model_dir, "model_dtype": "float32"}
        )
        layout = layout_of(config, dist.get_world_size())
        learner = Learner(config, shape=shape, layout=layout, host_group=host_group)
        padding = {"multiple_of": layout.pack_multiple_of, "document_multiple_of": layout.document_multiple_of}
        plan = packing.plan_step(
            samples,
            pack_length=layout.round_up(config.parallel.pack_length),
            dp=layout.data,
            num_mini_batches=1,
            micro_batches_multiple_of=layout.micro_batches_multiple_of,
            share_prompts=layout.context == 1,
            **padding,
        )
        index, slices = packing.to_slices(samples, plan, **padding)
        learned = learner.learn(index, slices[learner.policy.coordinate.data].filled(), step=1)
        metrics[loss] = learned.metrics | {"grad_norm": learned.results[0].grad_norm}
        gradients[loss] = [shard.gradient.clone() for shard in learner.policy.shards]
    largest = max(float(gradient.abs().max()) for gradient in gradients[NAMED])
    error = max(float((a - b).abs().max()) for a, b in zip(gradients[NAMED], gradients[OWN], strict=True))
    return {"metrics": metrics, "largest": largest, "error": error}
