"""Loss, gradient and metrics of one batch over 1, 2 and 4 data-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgrpo.algo import entropy_bonus, loss_denominator, policy_loss
from tests.unit.algo.loss_cases import LENGTHS, RESPONSE_LENGTH, batch, loss_config, reduced, select
from tests.unit.algo.test_loss_invariance import CONFIGS

SEED, PARAMETERS = 279, 5
CASES = [
    *(("gspo", aggregation) for aggregation in ("token", "constant", "seq_mean", "dr_grpo", "luspo")),
    *((name, "token") for name in CONFIGS),
]
# The last rank of four has nothing, as a rank with dummy packs.
SPLITS = {1: [[0, 1, 2, 3, 4, 5]], 2: [[5, 0], [3, 1, 4, 2]], 4: [[2], [4, 0], [1, 3, 5], []]}


def total(value: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over the ranks of the group; over this process alone without one."""
    value = torch.as_tensor(value).detach().clone()
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def train(sequences: list[list[int]]) -> list[dict[str, Any]]:
    """Every case on this rank's sequences of the batch: the loss and the gradient of a small linear policy, reduced."""
    own = sequences[dist.get_rank() if dist.is_initialized() else 0]
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    b = batch(SEED, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    b["features"] = torch.randn(len(b["logprobs"]), PARAMETERS, generator=generator)
    b = select(b, own)
    features, logprobs = b.pop("features"), b.pop("logprobs")
    results = []
    for name, aggregation in CASES:
        config = loss_config(aggregation=aggregation, loss_denominator="40", beta=0.2, **CONFIGS[name])
        num_trained, num_seqs = int(total(b["loss_mask"].sum(), group)), int(total(len(own), group))
        denominator = loss_denominator(num_trained, config, num_seqs=num_seqs, response_length=RESPONSE_LENGTH)
        weights = torch.zeros(PARAMETERS, requires_grad=True)
        got = policy_loss(logprobs + features @ weights, **b, config=config, denominator=denominator)
        entropy = (features @ weights).exp()
        bonus = entropy_bonus(entropy, b["loss_mask"], coef=0.01, num_trained_tokens=num_trained)
        loss = got.loss - bonus
        loss.backward()
        metrics = reduced({metric: total(pair, group) for metric, pair in got.metrics.items()})
        results.append(
            {"loss": float(total(loss, group)), "grad": total(weights.grad, group).numpy(), "metrics": metrics}
        )
    return results


@pytest.mark.parametrize("dp", [2, 4])
def test_loss_and_gradient_do_not_depend_on_the_number_of_ranks(run_ranks, dp):
    """The same settings would train differently on another machine, and learning rates could not be carried over."""
    assert sorted(s for part in SPLITS[dp] for s in part) == list(range(len(LENGTHS)))
    want = train(SPLITS[1])
    by_rank = run_ranks(dp, train, sequences=SPLITS[dp])
    for case, alone, *ranks in zip(CASES, want, *by_rank, strict=True):
        for got in ranks:
            assert got["loss"] == pytest.approx(alone["loss"], abs=5e-7), case
            assert got["grad"] == pytest.approx(alone["grad"], abs=5e-7), case
            assert got["metrics"] == pytest.approx(alone["metrics"], abs=5e-7), case
