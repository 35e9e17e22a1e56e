"""Updates of the weights, recorded on each rank, and AdamW in float64 from the same gradients.

Losses of two runs in 16 bits are not comparable after several updates. A sum in another order moves a float32 master by about
2^-24 of its value; where the master lies that close to the middle between two neighbours of bfloat16, the weight differs by up
to 2^-7 of its value (2^-10 in float16), and all later steps differ with it. Which weights these are depends on the machine's
instructions: ONEDNN_MAX_CPU_ISA=AVX2 moves the loss of the fourth step of a tiny model by 4e-4 between two ZeRO stages.
To float32's precision three things agree: gradients of one step from equal weights, masters that follow from given gradients,
and weights with the masters that they are rounded from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from mgrpo.config.schema import Optimizer
from tests.ranks import cases
from tests.ranks.lora_cases import Held, held


def first_update(model_dir: str, layout: dict[str, Any], samples: list[Any], dtype: str) -> dict[str, Any]:
    """One update: its gradient norm, clipped gradients, masters, and the weights that the next forward pass reads."""
    policy = cases.make_policy(model_dir, layout, dtype=getattr(torch, dtype))
    live = policy.parameters.live
    read: Held = []

    def watch(name: str) -> Any:
        pieces = policy.parameters.places[name].pieces

        def remember(*call: Any) -> None:
            read.extend(held((piece.box, piece.view(live[name].data)) for piece in pieces))

        return remember

    names = {id(parameter): name for name, parameter in live.items()}
    for chunk in policy.chunks:
        for module in chunk.modules():
            for parameter in module.parameters(recurse=False):
                module.register_forward_hook(watch(names[id(parameter)]))
    policy.prepare_training(Optimizer(learning_rate=1e-2, adam_epsilon=1e-2), num_optimizer_steps=1)
    packs, num_trained = cases.own_packs(policy, samples, share_prompts=True, pack_length=64)
    result = policy.train_step(
        policy.microbatches(packs), lambda logprobs, entropy, batch: (-logprobs.sum() / num_trained, None)
    )
    read.clear()
    policy.score(policy.microbatches(packs[:1]), "old")
    places = policy.parameters.places
    return {
        "grad_norm": result.grad_norm,
        "gradients": [box for shard in policy.shards for box in held(shard.boxes(places[shard.name], shard.gradient))],
        "masters": [box for shard in policy.shards for box in held(shard.boxes(places[shard.name], shard.main))],
        "read": read,
        "bytes": cases.held_bytes(policy),
    }


@contextmanager
def followed_updates() -> Iterator[list[float]]:
    """Within it each update of the policy's optimizer appends the largest error of this rank's masters.

    The truth is AdamW without decay in float64 (Kingma and Ba 2015), from the masters before the first update and the clipped
    gradients of each.
    """
    from mgrpo.policy.optimizer import PolicyOptimizer

    step, errors = PolicyOptimizer._step, []
    states: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def followed(optimizer: PolicyOptimizer) -> None:
        settings, number = optimizer.settings, len(errors) + 1
        if not states:
            for shard in optimizer.shards:
                weight = shard.main.double()
                states.append((weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)))
        gradients = [shard.gradient.double() for shard in optimizer.shards]
        step(optimizer)
        for (weight, mean, square), gradient in zip(states, gradients, strict=True):
            mean.lerp_(gradient, 1 - settings.adam_beta1)
            square.lerp_(gradient.square(), 1 - settings.adam_beta2)
            scale = (square / (1 - settings.adam_beta2**number)).sqrt() + settings.adam_epsilon
            weight -= optimizer.learning_rate(number - 1) * mean / (1 - settings.adam_beta1**number) / scale
        pairs = zip(optimizer.shards, states, strict=True)
        errors.append(max(float((shard.main - weight).abs().max()) for shard, (weight, *_) in pairs))

    with patch.object(PolicyOptimizer, "_step", followed):
        yield errors
