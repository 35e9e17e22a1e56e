"""What the rank tests of log-probabilities share."""

from __future__ import annotations

import torch

from mgrpo.ops import KeptSets

TOKENS, VOCAB, PADDED, TEMPERATURE = 9, 509, 512, 0.7


def sets_of(targets: torch.Tensor) -> KeptSets:
    """Of 1 to 8 tokens for each target, which some shards hold none of."""
    generator = torch.Generator().manual_seed(4)
    sizes = torch.arange(len(targets)) % 8 + 1
    others = [torch.randperm(VOCAB, generator=generator) for _ in targets]
    sets = [
        torch.cat((y[None], ids[ids != y][: size - 1]))
        for y, ids, size in zip(targets, others, sizes.tolist(), strict=True)
    ]
    ids = torch.cat([targets[:0], *sets]).int()
    return KeptSets(ids, torch.cat((torch.zeros(1), sizes.cumsum(0))).int())


def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    weight = torch.arange(1.0, logprobs.shape[0] + 1, dtype=logprobs.dtype)
    return (weight * logprobs).sum() + 0.1 * (entropy / weight).sum()
