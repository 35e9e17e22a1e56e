"""What the ranks of the tests of teachers run: a teacher's scores of packs, and a step of a policy that learns from such scores."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mgrpo import packing
from mgrpo.config.derived import layout_of
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.moving import from_values
from mgrpo.types import TeacherScores, TrainSample
from tests.ranks.cases import forget_groups, make_policy, own_packs


def scores(
    model_dir: str,
    layout: dict[str, Any],
    samples: list[TrainSample],
    num_likeliest: int,
    temperature: float,
    **options: Any,
) -> dict[int, TeacherScores]:
    """A model's judgement of this rank's samples, by sample; nothing before the last stage."""
    policy = make_policy(model_dir, layout, **options)
    packs, _ = own_packs(policy, samples, share_prompts=True, pack_length=64)
    microbatches = policy.microbatches(packs)
    scored = policy.teach(microbatches, num_likeliest=num_likeliest, temperature=temperature)
    found = {}
    for batch, taught in zip(microbatches, scored, strict=policy.is_last_stage):
        cuts = batch.pack.response_cu_seqlens
        whole = TeacherScores(
            logprobs=taught.logprobs.cpu().numpy(),
            ids=None if taught.ids is None else taught.ids.cpu().numpy(),
            likeliest=None if taught.likeliest is None else taught.likeliest.cpu().numpy(),
        )
        for number, a, b in zip(batch.pack.samples, cuts[:-1], cuts[1:], strict=True):
            found[int(number)] = whole.part(slice(a, b))
    return found


def step(settings: dict[str, Any], samples: list[TrainSample]) -> dict[str, Any]:
    """A learner's step: its metrics, the gradient's norm, and every gradient that this rank has, as boxes of HF tensors."""
    from mgrpo.run.train.learner import Learner

    forget_groups()
    host_group = dist.new_group(backend="gloo")
    config = from_values(settings)
    layout = layout_of(config, dist.get_world_size())
    shape = shape_of(read_hf_config(config.model.model_name_or_path))
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
    return {
        "metrics": learned.metrics,
        "grad_norm": learned.results[0].grad_norm,
        "gradients": [
            (box, gradient.cpu().clone().numpy())
            for shard in learner.policy.shards
            for box, gradient in shard.boxes(learner.policy.parameters.places[shard.name], shard.gradient)
        ],
    }
