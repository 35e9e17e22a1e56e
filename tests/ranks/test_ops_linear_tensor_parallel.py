"""linear_logprobs over an LM head that is sharded over gloo ranks, against the whole head on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mgrpo.ops import linear_logprobs, reference
from tests.ranks.ops_cases import PADDED, TEMPERATURE, TOKENS, VOCAB, loss_of, sets_of

HIDDEN = 16


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same on every rank: hidden `[tokens, hidden]`, weight `[padded vocab, hidden]`, targets `[tokens]`."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=generator).mul(2 / HIDDEN**0.5).to(dtype)
    weight[VOCAB:] = torch.nan
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def score_shard(dtype: str, shard_cols: list[int], logits_chunk: int, is_cut: bool = False) -> dict:
    """This rank's results on its own rows of the weight; each rank's chunks have another size."""
    rank = dist.get_rank()
    start = sum(shard_cols[:rank])
    hidden, weight, targets = inputs(getattr(torch, dtype))
    hidden.requires_grad_()
    shard = weight[start : start + shard_cols[rank]].clone().requires_grad_()
    arguments = {
        "temperature": TEMPERATURE,
        "vocab_start": start,
        "valid_cols": max(0, min(shard_cols[rank], VOCAB - start)),
        "group": dist.new_group(backend="gloo"),
        "with_entropy": True,
        "logits_chunk": logits_chunk + rank,
    }
    logprobs, entropy = linear_logprobs(hidden, shard, targets, kept=sets_of(targets) if is_cut else None, **arguments)
    d_hidden, d_weight = torch.autograd.grad(loss_of(logprobs, entropy), (hidden, shard))
    none = hidden[:0].detach().requires_grad_()
    sets = sets_of(targets[:0]) if is_cut else None
    empty = torch.cat(linear_logprobs(none, shard, targets[:0], kept=sets, **arguments))
    d_empty = torch.autograd.grad(empty.sum(), (none, shard))
    return {
        "logprobs": logprobs.detach().numpy(),
        "entropy": entropy.detach().numpy(),
        "d_hidden": d_hidden.float().numpy(),
        "d_weight": d_weight.float().numpy(),
        "empty": [empty.numel(), d_empty[0].numel(), int(d_empty[1].count_nonzero())],
    }


@pytest.mark.parametrize(
    ("dtype", "value_tolerance", "grad_tolerance"),
    [("float32", 3e-6, 5e-6), ("bfloat16", 4e-2, 1e-1), ("float16", 5e-3, 1.5e-2)],
)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "kept"])
@pytest.mark.parametrize("shard_cols", [[256, 256], [100, 412], [510, 2], [128] * 4, [7, 200, 302, 3]], ids=str)
def test_sharded_head_equals_the_whole(
    run_ranks, dtype: str, value_tolerance: float, grad_tolerance: float, shard_cols: list[int], is_cut: bool
) -> None:
    """Without the all-reduce each rank sends its own part of the gradient down the model, and all drift apart.

    Of a kept set a rank may own no token; the last may own nothing but padding, in which there is NaN.
    """
    hidden, weight, targets = inputs(getattr(torch, dtype))
    hidden, whole = hidden.double().requires_grad_(), weight[:VOCAB].double().requires_grad_()
    kept = sets_of(targets) if is_cut else None
    values = reference.token_logprobs(hidden @ whole.t(), targets, temperature=TEMPERATURE, kept=kept)
    d_hidden, d_weight = torch.autograd.grad(loss_of(*values), (hidden, whole))

    ranks = run_ranks(len(shard_cols), score_shard, dtype=dtype, shard_cols=shard_cols, logits_chunk=37, is_cut=is_cut)
    assert all(rank["empty"] == [0, 0, 0] for rank in ranks)
    for name, expected in zip(("logprobs", "entropy"), values, strict=True):
        assert len({rank[name].tobytes() for rank in ranks}) == 1
        got = torch.from_numpy(ranks[0][name]).double()
        torch.testing.assert_close(got, expected, rtol=value_tolerance, atol=value_tolerance)
    # Sums of cotangents up to 9: the tolerance is that of the largest gradient, 0.1 of 30 in bf16.
    assert len({rank["d_hidden"].tobytes() for rank in ranks}) == 1
    got = torch.from_numpy(ranks[0]["d_hidden"]).double()
    torch.testing.assert_close(got, d_hidden, rtol=grad_tolerance, atol=grad_tolerance)
    got = torch.cat([torch.from_numpy(rank["d_weight"]) for rank in ranks]).double()
    torch.testing.assert_close(got[:VOCAB], d_weight, rtol=grad_tolerance, atol=grad_tolerance)
    assert got[VOCAB:].count_nonzero() == 0
