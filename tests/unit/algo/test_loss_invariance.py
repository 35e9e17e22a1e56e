"""Loss, gradient and metrics do not depend on how the sequences were cut into micro-batches or ordered in packs."""

from __future__ import annotations

import math

import pytest
import torch

from mgrpo.algo import LossConfig, policy_loss
from mgrpo.algo.loss_metrics import MAXIMA, METRICS
from tests.unit.algo.loss_cases import LENGTHS, batch, loss_config, reduced, select, whole_denominator

CONFIGS = {
    "ppo_clip": {},
    "gspo": {"ratio_level": "sequence"},
    "gspo_token": {"ratio_level": "sequence_token"},
    "cispo": {"policy_loss": "cispo"},
    "sapo": {"policy_loss": "sapo"},
    "vespo": {"policy_loss": "vespo", "use_rho_correction": True, "rho_clamp_upper_bound": 1.1},
    "sequence mask": {
        "use_rho_correction": True,
        "rho_level": "sequence_mean",
        "rho_mask_level": "sequence_sum",
        "rho_mask_upper_bound": 1.3,
    },
    "total variation": {"use_rho_correction": True, "rho_mask_level": "divergence", "rho_mask_upper_bound": 0.2},
    "off-policy mask": {"off_policy_mask_threshold": -0.05},
}
AGGREGATIONS = ("token", "constant", "seq_mean", "dr_grpo", "luspo")
SEED = 279


def settings(name: str, aggregation: str) -> LossConfig:
    return loss_config(aggregation=aggregation, loss_denominator="40", beta=0.2, **CONFIGS[name])


def parts_of(b: dict[str, torch.Tensor], parts: list[list[int]], config: LossConfig):
    """Loss, gradient by token of the original order and metrics, added up over the parts."""
    denominator = whole_denominator(b, config)
    b = {**b, "logprobs": b["logprobs"].clone().requires_grad_()}
    loss = 0.0
    sums = {name: torch.zeros(2) for name in METRICS}
    maxima = {name: torch.tensor(-math.inf) for name in MAXIMA}
    for part in parts:
        got = policy_loss(**select(b, part), config=config, denominator=denominator)
        got.loss.backward()
        loss += got.loss.item()
        sums = {name: sums[name] + got.metrics[name] for name in sums}
        maxima = {name: torch.maximum(maxima[name], got.maxima[name]) for name in maxima}
    return loss, b["logprobs"].grad, reduced(sums, maxima)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_splits_and_packing_order_change_nothing(name, aggregation):
    """The same batch would be another step on another number of GPUs, and no two runs could be compared."""
    b = batch(SEED, dtype=torch.float32)
    config = settings(name, aggregation)
    # Without a denominator it is that of all of the batch, which dr_grpo has to be told.
    denominator = whole_denominator(b, config) if aggregation == "dr_grpo" else None
    whole = policy_loss(**b, config=config, denominator=denominator)
    want_loss, want_grad, want_metrics = parts_of(b, [[0, 1, 2, 3, 4, 5]], config)
    assert whole.loss.item() == pytest.approx(want_loss, rel=1e-6, abs=1e-6)
    for parts in (
        [[5, 3, 1, 0, 2, 4]],
        [[0, 1], [2, 3], [4, 5]],
        [[0], [1], [2], [3], [4], [5]],
        [[4, 0], [], [5, 2, 1, 3]],
    ):
        loss, grad, metrics = parts_of(b, parts, config)
        assert loss == pytest.approx(want_loss, rel=1e-6, abs=1e-6)
        torch.testing.assert_close(grad, want_grad, rtol=1e-6, atol=1e-8)
        assert metrics == pytest.approx(want_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_two_documents_in_a_pack_are_two_documents(name):
    """Ratios, rhos and masks of a completion would depend on whom it happened to share a pack with."""
    b = batch(SEED)
    config = settings(name, "constant")
    for first, second in ((2, 4), (5, 0), (4, 5)):
        alone = [policy_loss(**select(b, [s]), config=config) for s in (first, second)]
        together = policy_loss(**select(b, [first, second]), config=config)
        assert together.loss.item() == pytest.approx(sum(part.loss.item() for part in alone), rel=1e-12)
        for metric in METRICS:
            torch.testing.assert_close(together.metrics[metric], alone[0].metrics[metric] + alone[1].metrics[metric])


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("ppo_clip", "cispo", "sapo")])
def test_taking_a_pack_for_a_sequence_would_be_noticed(name):
    """The two tests above would pass on a loss that has no quantity of a whole sequence at all."""
    b = batch(SEED)
    as_one = {**b, "advantages": b["advantages"].repeat_interleave(b["cu_seqlens"].diff())}
    as_one["cu_seqlens"] = b["cu_seqlens"][[0, -1]]
    config = settings(name, "constant")
    by_document, by_pack = policy_loss(**b, config=config).loss, policy_loss(**as_one, config=config).loss
    assert by_pack.item() != pytest.approx(by_document.item(), rel=1e-3)


def test_local_token_follows_the_micro_batches_it_is_told_and_not_the_packs():
    """TRL's bnpo depends on which sequences share its micro-batch; here that is the caller's statement, not the packer's."""
    b = batch(SEED)
    config = loss_config(aggregation="local_token", beta=0.2)
    trained = torch.tensor([float(mask.sum()) for mask in b["loss_mask"].split(LENGTHS)])
    # Two micro-batches of three sequences, in the order of sampling.
    denominators = 2 * trained.view(2, 3).sum(1).repeat_interleave(3)
    whole = policy_loss(**b, config=config, denominator=denominators)
    for parts in ([[5, 3], [1, 0], [2, 4]], [[0, 1, 2], [3, 4, 5]]):
        got = sum(
            policy_loss(**select(b, part), config=config, denominator=denominators[part]).loss.item() for part in parts
        )
        assert got == pytest.approx(whole.loss.item(), rel=1e-12)
    other = 2 * trained[[0, 2, 4, 1, 3, 5]].view(2, 3).sum(1).repeat(
        3
    )  # sequences 0, 2, 4 share one, 1, 3, 5 the other
    assert policy_loss(**b, config=config, denominator=other).loss.item() != pytest.approx(whole.loss.item(), rel=1e-3)
