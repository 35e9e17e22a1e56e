"""The losses that other trainers' own functions gave for their own words, against ours through the doors for these words.

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
from mgrpo.config import ConfigError
from mgrpo.config.schema import Config

DOORS: dict[str, Callable[[Any], Config]] = {
    "verl": mgrpo.GRPOConfig.from_verl,
    "slime": mgrpo.GRPOConfig.from_slime,
    "trl": mgrpo.GRPOConfig.from_trl,
}


@cache
def recorded(trainer: str) -> dict[str, Any]:
    return json.loads(Path(__file__).with_name(f"losses_of_{trainer}.json").read_text())


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
