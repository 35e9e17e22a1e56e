"""What the ranks of the tests of teachers run: a teacher's scores of packs, and steps of a policy that learns from some."""

from __future__ import annotations

from typing import Any

import numpy as np

from mgrpo.types import TeacherScores, TrainSample
from tests.ranks.cases import make_policy, own_packs


def taught(
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
    for batch, scores in zip(microbatches, scored, strict=policy.is_last_stage):
        cuts = batch.pack.response_cu_seqlens
        whole = TeacherScores(
            logprobs=scores.logprobs.cpu().numpy(),
            ids=None if scores.ids is None else scores.ids.cpu().numpy(),
            likeliest=None if scores.likeliest is None else scores.likeliest.cpu().numpy(),
        )
        for number, a, b in zip(batch.pack.samples, cuts[:-1], cuts[1:], strict=True):
            found[int(number)] = whole.part(np.arange(a, b))
    return found
