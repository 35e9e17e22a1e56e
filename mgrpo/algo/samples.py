"""From scored groups to what the optimizer trains on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mgrpo.algo.advantage import advantages
from mgrpo.types import ScoredGroup, TrainSample


def train_samples(groups: Sequence[ScoredGroup], *, normalization: str) -> list[TrainSample]:
    """One sample a completion, in order, with its advantage within its group.

    A completion without a score (NaN) stays in the list with advantage 0 and no trained token, so that nothing is lost
    without being counted.
    """
    rewards = np.stack([group.rewards for group in groups])
    by_group = advantages(torch.from_numpy(rewards), normalization=normalization).tolist()
    return [
        TrainSample(
            prompt_tokens=scored.group.prompt.tokens,
            tokens=completion.tokens,
            loss_mask=np.full(len(completion.tokens), not np.isnan(reward)),
            rollout_logprobs=completion.logprobs,
            advantage=advantage,
            group=number,
        )
        for number, (scored, row, own) in enumerate(zip(groups, rewards, by_group, strict=True))
        for completion, reward, advantage in zip(scored.group.completions, row, own, strict=True)
    ]
