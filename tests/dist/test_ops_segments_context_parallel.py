"""segment_mean and a loss on the sequences' ratios, where each gloo rank holds a part of every sequence."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mgrpo.ops import policy_loss, segment_mean, segment_sums

LENGTHS = (5, 0, 37, 1, 300, 8, 64)
UNTRAINED = 5
TOLERANCE = {"float32": 2e-6, "float64": 1e-13}


def inputs(dtype: str) -> dict[str, Tensor]:
    """Whole sequences, the same on every rank. Weights are mask / denominator, known to all."""
    generator = torch.Generator().manual_seed(5)
    n = sum(LENGTHS)
    random = torch.randn(5, n, generator=generator)
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (torch.rand(n, generator=generator) < 0.8) & (segment != UNTRAINED)
    logprobs = -2 + 0.5 * random[0]
    operands = {
        "logprobs": torch.where(mask, logprobs, torch.nan),
        "old_logprobs": logprobs + 0.3 * random[1],
        "ref_logprobs": logprobs + 0.3 * random[2],
        "rollout_logprobs": logprobs + 0.3 * random[3],
        "advantages": random[4],
        "mask": mask,
        "weights": mask / mask.sum(),
    }
    return {name: x.to(getattr(torch, dtype)) for name, x in operands.items()}


def held_tokens(layout: str, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Positions of this rank's tokens in the whole, and its cu_seqlens: as many sequences, their parts maybe empty."""
    starts = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    parts = []
    for start, length in zip(starts.tolist(), LENGTHS, strict=False):
        if layout == "zigzag":  # a chunk from the front and its mirror image, as causal attention is balanced
            cuts = [start + length * k // (2 * size) for k in range(2 * size + 1)]
            chunks = [(cuts[k], cuts[k + 1]) for k in (rank, 2 * size - 1 - rank)]
        elif layout == "contiguous":
            chunks = [(start + length * rank // size, start + length * (rank + 1) // size)]
        else:  # all of a sequence on one rank, and the first rank without any token
            owner = 1 + length % (size - 1)
            chunks = [(start, start + length)] if rank == owner else []
        parts.append(torch.cat([torch.arange(a, b) for a, b in chunks] or [torch.arange(0)]))
    cu_seqlens = [0, *itertools.accumulate(len(part) for part in parts)]
    return torch.cat(parts), torch.tensor(cu_seqlens, dtype=torch.int32)


def gspo(operands: dict[str, Tensor], cu_seqlens: Tensor, group: dist.ProcessGroup | None) -> dict:
    """Loss, its gradient, the sequences' ratios and sums, of the tokens that these operands hold."""
    logprobs = operands["logprobs"].clone().requires_grad_()
    mask = operands["mask"]
    seq_log_ratio = segment_mean(logprobs - operands["old_logprobs"], mask, cu_seqlens, group=group)
    loss, sums = policy_loss(
        logprobs,
        cu_seqlens=cu_seqlens,
        seq_log_ratio=seq_log_ratio,
        **{name: operands[name] for name in operands if name not in ("logprobs", "mask")},
        ratio_level="sequence",
        clip_low=0.97,
        clip_high=1.04,
        beta=0.1,
        kl_estimator=3,
        use_rho=True,
        rho_bounds=(0.0, 2.0, 0.0, 0.0),
    )
    loss.backward()
    return {
        "loss": loss.detach(),
        "grad": logprobs.grad,
        "seq_log_ratio": seq_log_ratio.detach(),
        "trained": segment_sums(mask, mask, cu_seqlens, group=group),
        "sums": sums,
    }


def train_on_part(dtype: str, layout: str) -> dict:
    """This rank's share of the loss."""
    tokens, cu_seqlens = held_tokens(layout, dist.get_rank(), dist.get_world_size())
    own = {name: x[tokens] for name, x in inputs(dtype).items()}
    return {name: x.numpy() for name, x in gspo(own, cu_seqlens, dist.group.WORLD).items()}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "one_rank_without_tokens"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sequences_that_ranks_share_train_as_on_one_rank(run_ranks, dtype: str, world_size: int, layout: str) -> None:
    """With each rank's own mean as the ratio, and its own gradient only, context parallelism would be another loss."""
    whole = gspo(inputs(dtype), torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32), None)
    is_clipped = whole["sums"][:, 7:9].sum(1) > 0
    assert is_clipped.any() and not is_clipped.all()

    ranks = run_ranks(world_size, train_on_part, dtype=dtype, layout=layout)
    ranks = [{name: torch.from_numpy(x) for name, x in rank.items()} for rank in ranks]
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for name in ("seq_log_ratio", "trained"):
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks)
        torch.testing.assert_close(ranks[0][name], whole[name], **tolerance)
    torch.testing.assert_close(sum(rank["loss"] for rank in ranks), whole["loss"], **tolerance)
    grad = torch.full_like(whole["grad"], torch.nan)
    for rank, result in enumerate(ranks):
        grad[held_tokens(layout, rank, world_size)[0]] = result["grad"]
    torch.testing.assert_close(grad, whole["grad"], **tolerance)
    *added, _ = (sum(rank["sums"] for rank in ranks)).unbind(1)
    torch.testing.assert_close(torch.stack(added, 1), whole["sums"][:, :-1], rtol=1e-5, atol=1e-5)
    largest = torch.stack([rank["sums"][:, -1] for rank in ranks]).amax(0)
    torch.testing.assert_close(largest, whole["sums"][:, -1], **tolerance)


def mean_beside_another_branch() -> list:
    """Gradients of two terms whose sum hands both the same cotangent."""
    weights, cu_seqlens = torch.ones(4), torch.tensor([0, 1, 4], dtype=torch.int32)
    x, bias = torch.randn(4).requires_grad_(), torch.zeros(2, requires_grad=True)
    other = bias * 1  # made before the mean, so backward comes to it after the mean
    total = segment_mean(x, weights, cu_seqlens, group=dist.group.WORLD) + other
    (total * (1 + dist.get_rank())).sum().backward()
    return [bias.grad.tolist(), x.grad.tolist()]


def test_backward_leaves_the_cotangent_of_others_alone(run_ranks) -> None:
    """Autograd hands one tensor to several branches; summed over the ranks in place it is wrong in the others."""
    for rank, (bias, x) in enumerate(run_ranks(2, mean_beside_another_branch)):
        assert bias == [1.0 + rank] * 2
        # 1 + 2 over the ranks, shared by the tokens of both.
        assert x == pytest.approx([3 / 2, 3 / 6, 3 / 6, 3 / 6])
