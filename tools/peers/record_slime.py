"""Losses and gradients that slime's own functions give, for tests.

    TORCHDYNAMO_DISABLE=1 PYTHONPATH=.:SLIME python -m tools.peers.record_slime SLIME > tests/unit/algo/losses_of_slime.json

SLIME is a clone of slime, beside torch, megatron-core and transformers; SGLang, whose flags slime's parser joins to its own,
is not needed. Run it again when slime changes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

from tools.peers.losses import LONGEST, Batch, record, version_of

sys.modules["slime.backends.sglang_utils.arguments"] = MagicMock()

from slime.backends.megatron_utils import loss as slime_loss  # noqa: E402
from slime.utils.arguments import get_slime_extra_args_provider  # noqa: E402

COMMON = (
    "--rollout-batch-size 4 --n-samples-per-prompt 8 --num-rollout 3 --global-batch-size 32 --colocate "
    f"--rollout-max-response-len {LONGEST}"
)
ESTIMATORS = ("grpo", "gspo", "cispo")
CLIPS = (
    "",
    "--eps-clip 0.3",
    "--eps-clip 0.1 --eps-clip-high 0.28",
    "--eps-clip 1.0 --eps-clip-high 4.0",
    "--eps-clip-c 1.5",
)
CORRECTIONS = ("--use-tis", "--use-tis --tis-clip 1.5 --tis-clip-low 0.6")
KL = ("k1", "k2", "k3", "low_var_kl")


def flags() -> Iterator[str]:
    """The flags of each case, beside `COMMON`."""
    for estimator, average in itertools.product(ESTIMATORS, ("", " --calculate-per-token-loss")):
        loss = f"--advantage-estimator {estimator}{average}"
        for clip in CLIPS:
            # PPO without a lower bound is not a loss of this project.
            if estimator == "cispo" or "--eps-clip 1.0" not in clip:
                yield f"{loss} {clip}".strip()
        for correction in CORRECTIONS:
            yield f"{loss} {correction}"
        for kind in KL:
            penalty = f"{loss} --use-kl-loss --kl-loss-coef 0.05 --kl-loss-type {kind}"
            yield penalty
            if estimator != "gspo":
                yield f"{penalty} --use-unbiased-kl"


def loss_of(given: str, batch: Batch, logprobs: Tensor) -> Tensor:
    """The loss that slime hands to Megatron, over the divisor that it hands with it, on one rank."""

    def cut(rows: Tensor) -> list[Tensor]:
        return [row[:length] for row, length in zip(rows, batch.lengths, strict=True)]

    masks = [mask.double() for mask in cut(batch.mask)]
    scored = {"log_probs": cut(logprobs), "entropy": cut(torch.zeros_like(logprobs))}
    inputs = {
        "advantages": [a.expand(length) for a, length in zip(batch.advantages, batch.lengths, strict=True)],
        "log_probs": cut(batch.old_logprobs),
        "ref_log_probs": cut(batch.ref_logprobs),
        "rollout_log_probs": cut(batch.rollout_logprobs),
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "response_lengths": list(batch.lengths),
        "total_lengths": list(batch.lengths),
        "unconcat_tokens": None,
    }
    parallel = MagicMock()
    parallel.get_context_parallel_world_size.return_value = parallel.get_data_parallel_world_size.return_value = 1
    with (
        patch.object(slime_loss, "get_log_probs_and_entropy", return_value=(None, scored)),
        patch.object(slime_loss, "mpu", parallel),
        patch("slime.backends.megatron_utils.cp_utils.mpu", parallel),
    ):
        loss, divisor, _ = slime_loss.loss_function(parsed(given), inputs, 1, len(batch.lengths), logits=logprobs)
    return loss / divisor


def parsed(given: str) -> argparse.Namespace:
    """The arguments as slime has them after its checks, of which one sets a default."""
    parser = get_slime_extra_args_provider()(argparse.ArgumentParser())
    arguments = parser.parse_args(given.split())
    if arguments.eps_clip_high is None:
        arguments.eps_clip_high = arguments.eps_clip
    # Of Megatron's own parser.
    known: dict[str, Any] = {"calculate_per_token_loss": False, "allgather_cp": False}
    for name, value in known.items():
        vars(arguments).setdefault(name, value)
    return arguments


if __name__ == "__main__":
    record(f"slime {version_of(Path(sys.argv[1]))}", (f"{COMMON} {flag}" for flag in flags()), loss_of)
