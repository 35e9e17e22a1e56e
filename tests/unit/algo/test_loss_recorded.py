"""The losses and advantages that other trainers' own functions gave for their own words, against ours through the doors for
these words.

The files are made by the programs in tools/peers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mgrpo
from mgrpo.algo import denominators, policy_loss
from mgrpo.algo.training_samples import train_samples
from mgrpo.config import ConfigError
from mgrpo.config.schema import Config
from tests import builders

DOORS: dict[str, Callable[[Any], Config]] = {
    "verl": mgrpo.GRPOConfig.from_verl,
    "slime": mgrpo.GRPOConfig.from_slime,
    "trl": mgrpo.GRPOConfig.from_trl,
}


OPENRLHF = {
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "group_norm": "standard",
    "dr_grpo": "centered",
}
"""advantage_normalization_type for its algo.advantage.estimator, of docs/algorithms.md; its deviation is the sample's in a group only."""


@cache
def recorded(trainer: str, what: str = "losses") -> dict[str, Any]:
    return json.loads(Path(__file__).with_name(f"{what}_of_{trainer}.json").read_text())


def ours(config: Config, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient in float64, with the denominators of a mini-batch that is this batch."""
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in batch.items() if name != "lengths"}
    mask = tensors.pop("mask").bool()
    logprobs = tensors.pop("logprobs").requires_grad_()
    lengths = torch.tensor(batch["lengths"])
    sequences = np.arange(len(lengths))
    divisor = denominators(
        sequences,
        sequences,
        np.array([part.sum() for part in mask.split(lengths.tolist())]),
        config=config.loss,
        response_length=config.rollout.response_length,
    )
    loss = policy_loss(
        logprobs,
        **tensors,
        loss_mask=mask,
        cu_seqlens=torch.cat((torch.zeros(1), lengths.cumsum(0))).int(),
        config=config.loss,
        denominator=torch.from_numpy(divisor) if isinstance(divisor, np.ndarray) else divisor,
    ).loss
    loss.backward()
    return loss.detach(), logprobs.grad


def difference(config: Config, case: dict[str, Any], batches: list[dict[str, Any]]) -> float:
    """The largest between the loss and each entry of its gradient, theirs and ours."""
    loss, gradient = ours(config, batches[case["batch"]])
    want = torch.tensor([case["loss"], *case["gradient"]], dtype=torch.float64)
    return (torch.cat((loss[None], gradient)) - want).abs().max().item()


@pytest.mark.parametrize("trainer", DOORS)
def test_the_words_of_a_trainer_train_what_they_train_there(trainer):
    """A command that is brought over would follow another gradient under the same words, and log plausible numbers."""
    found = recorded(trainer)
    far, refused = {}, []
    for case in found["cases"]:
        try:
            config = DOORS[trainer](case["given"])
        except ConfigError as err:
            refused.append((case["given"], str(err)))
            continue
        away = difference(config, case, found["batches"])
        if not away < 1e-6:
            far[str(case["given"])] = away
    assert far == {}
    # TRL's CISPO without a cap of its own, whose epsilon would cap every ratio at 0.2.
    assert all("loss_type=cispo needs epsilon_high" in said for _, said in refused)
    assert len(refused) == (2 if trainer == "trl" else 0)
    assert len(found["cases"]) > 70


def with_openrlhf(estimator: str) -> Config:
    kind = OPENRLHF[estimator]
    return mgrpo.GRPOConfig(
        advantage_normalization_type=kind, advantage_std="sample" if kind == "standard" else "population"
    )


@pytest.mark.parametrize("trainer", ["verl", "slime", "openrlhf"])
def test_the_words_of_a_trainer_have_the_advantages_that_they_have_there(trainer):
    """A mean over completions in place of tokens, or a deviation of another count, would scale every step of the run."""
    found = recorded(trainer, "advantages")
    door = DOORS.get(trainer, with_openrlhf)
    kinds = set()
    for case in found["cases"]:
        batch, algorithm = found["batches"][case["batch"]], door(case["given"]).algorithm
        masks = iter(batch["masks"])
        groups = [
            builders.scored_group(
                rewards,
                completions=[
                    builders.completion(len(mask), trajectory=builders.trajectory(mask))
                    for mask in (next(masks) for _ in rewards)
                ],
            )
            for rewards in batch["rewards"]
        ]
        kinds.add(algorithm.advantage_normalization_type)
        samples = train_samples(
            groups,
            normalization=algorithm.advantage_normalization_type,
            ddof=algorithm.advantage_ddof,
            eps=algorithm.advantage_eps,
        )
        got = [sample.advantage for sample in samples]
        # slime computes in float32; over the batch verl and slime add 1e-8 to the variance, and not to its root.
        assert got == pytest.approx(case["advantages"], rel=1e-6, abs=1e-6), case["given"]
    assert kinds >= {"standard", "centered", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    assert ("rloo" in kinds) == (trainer != "slime")
