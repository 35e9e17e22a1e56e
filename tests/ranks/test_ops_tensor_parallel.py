"""token_logprobs over a vocabulary that is sharded over gloo ranks, against the whole vocabulary on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mgrpo.ops import reference, token_logprobs
from tests.ranks.ops_cases import PADDED, TEMPERATURE, TOKENS, VOCAB, loss_of, sets_of


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same on every rank: logits `[tokens, padded vocab]`, rows and targets `[n]`."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(TOKENS, PADDED, generator=generator) * 5).to(dtype)
    rows = torch.randperm(TOKENS, generator=generator)[:6]
    return logits, rows, torch.randint(0, VOCAB, (6,), generator=generator)


def score_shard(dtype: str, shard_cols: list[int], inplace: bool, is_cut: bool = False) -> dict:
    """This rank's results on its own columns, of which those that pad the vocabulary hold NaN."""
    rank = dist.get_rank()
    start = sum(shard_cols[:rank])
    logits, rows, targets = inputs(getattr(torch, dtype))
    logits[:, VOCAB:] = torch.nan
    shard = logits[:, start : start + shard_cols[rank]].clone().requires_grad_()
    arguments = {
        "vocab_start": start,
        "valid_cols": max(0, min(shard_cols[rank], VOCAB - start)),
        "group": dist.new_group(backend="gloo"),
    }
    logprobs, entropy = token_logprobs(
        shard * 1,
        targets,
        rows=rows,
        temperature=TEMPERATURE,
        with_entropy=True,
        inplace=inplace,
        kept=sets_of(targets) if is_cut else None,
        **arguments,
    )
    loss_of(logprobs, entropy).backward()
    none = torch.empty(0, dtype=torch.int64)
    empty, _ = token_logprobs(shard, none, rows=none, kept=sets_of(none) if is_cut else None, **arguments)
    return {
        "logprobs": logprobs.detach().numpy(),
        "entropy": entropy.detach().numpy(),
        "grad": shard.grad.float().numpy(),
        "empty": empty.shape[0],
    }


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 4e-3), ("float16", 5e-4)])
@pytest.mark.parametrize(
    "shard_cols",
    # Halves, one of padding only, uneven; the same on four ranks.
    [[256, 256], [509, 3], [100, 412], [128] * 4, [200, 300, 9, 3], [1, 300, 7, 204]],
    ids=str,
)
def test_sharded_vocabulary_equals_the_whole(
    run_ranks, dtype: str, tolerance: float, shard_cols: list[int], inplace: bool
) -> None:
    """Tensor parallelism must not change the step, and ranks that disagree in one bit drift apart for good."""
    logits, rows, targets = inputs(getattr(torch, dtype))
    whole = logits.double().requires_grad_()
    expected = reference.token_logprobs(whole, targets, rows=rows, temperature=TEMPERATURE, valid_cols=VOCAB)
    loss_of(*expected).backward()
    alone = logits.clone().requires_grad_()
    arguments = {"rows": rows, "temperature": TEMPERATURE, "valid_cols": VOCAB, "with_entropy": True}
    on_one_rank = token_logprobs(alone, targets, **arguments)
    loss_of(*on_one_rank).backward()

    ranks = run_ranks(len(shard_cols), score_shard, dtype=dtype, shard_cols=shard_cols, inplace=inplace)
    assert all(rank["empty"] == 0 for rank in ranks)
    for i, name in enumerate(("logprobs", "entropy")):
        assert len({rank[name].tobytes() for rank in ranks}) == 1
        got = torch.from_numpy(ranks[0][name])
        torch.testing.assert_close(got.double(), expected[i], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got, on_one_rank[i].detach(), rtol=1e-6, atol=1e-6)
    grad = torch.cat([torch.from_numpy(rank["grad"]) for rank in ranks], 1)
    torch.testing.assert_close(grad.double(), whole.grad, rtol=tolerance, atol=2e-6)
    torch.testing.assert_close(grad, alone.grad.float(), rtol=2 * tolerance, atol=2e-6)
    assert grad[:, VOCAB:].count_nonzero() == 0


@pytest.mark.parametrize("shard_cols", [[256, 256], [509, 3], [200, 300, 9, 3]], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float16", 1e-3)])
def test_kept_sets_over_a_sharded_vocabulary_equal_a_masked_softmax(
    run_ranks, dtype: str, tolerance: float, shard_cols: list[int]
) -> None:
    """Each rank sums over its own ids of a set, and may own none: also then all must agree to the bit."""
    logits, rows, targets = inputs(getattr(torch, dtype))
    whole = logits.double().requires_grad_()
    expected = reference.token_logprobs(
        whole, targets, rows=rows, temperature=TEMPERATURE, valid_cols=VOCAB, kept=sets_of(targets)
    )
    loss_of(*expected).backward()
    ranks = run_ranks(len(shard_cols), score_shard, dtype=dtype, shard_cols=shard_cols, inplace=True, is_cut=True)
    assert all(rank["empty"] == 0 for rank in ranks)
    for name, values in zip(("logprobs", "entropy"), expected, strict=True):
        assert len({rank[name].tobytes() for rank in ranks}) == 1
        torch.testing.assert_close(torch.from_numpy(ranks[0][name]).double(), values, rtol=1e-6, atol=1e-6)
    grad = torch.cat([torch.from_numpy(rank["grad"]) for rank in ranks], 1)
    torch.testing.assert_close(grad.double(), whole.grad, rtol=tolerance, atol=2e-6)
