"""token_logprobs over a vocabulary that is sharded over gloo ranks, against the whole vocabulary on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mgrpo.ops import reference, token_logprobs

TOKENS, VOCAB, PADDED, TEMPERATURE = 9, 509, 512, 0.7


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same on every rank: logits `[tokens, padded vocab]`, rows and targets `[n]`."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(TOKENS, PADDED, generator=generator) * 5).to(dtype)
    rows = torch.randperm(TOKENS, generator=generator)[:6]
    return logits, rows, torch.randint(0, VOCAB, (6,), generator=generator)


def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    weight = torch.arange(1.0, logprobs.shape[0] + 1, dtype=logprobs.dtype)
    return (weight * logprobs).sum() + 0.1 * (entropy / weight).sum()


def score_shard(dtype: str, shard_cols: list[int], inplace: bool) -> dict:
    """This rank's results on its own columns."""
    rank = dist.get_rank()
    start = sum(shard_cols[:rank])
    logits, rows, targets = inputs(getattr(torch, dtype))
    shard = logits[:, start : start + shard_cols[rank]].clone().requires_grad_()
    arguments = {
        "vocab_start": start,
        "valid_cols": max(0, min(shard_cols[rank], VOCAB - start)),
        "group": dist.group.WORLD,
    }
    logprobs, entropy = token_logprobs(
        shard * 1, targets, rows=rows, temperature=TEMPERATURE, with_entropy=True, inplace=inplace, **arguments
    )
    loss_of(logprobs, entropy).backward()
    none = torch.empty(0, dtype=torch.int64)
    empty, _ = token_logprobs(shard, none, rows=none, **arguments)
    return {
        "logprobs": logprobs.detach().numpy(),
        "entropy": entropy.detach().numpy(),
        "grad": shard.grad.float().numpy(),
        "empty": empty.shape[0],
    }


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 4e-3)])
@pytest.mark.parametrize("shard_cols", [[256, 256], [509, 3], [100, 412]])
def test_sharded_vocabulary_equals_the_whole(
    run_ranks, dtype: str, tolerance: float, shard_cols: list[int], inplace: bool
) -> None:
    """Tensor parallelism must not change the step, and ranks that disagree in one bit drift apart for good."""
    logits, rows, targets = inputs(getattr(torch, dtype))
    whole = logits.double().requires_grad_()
    expected = reference.token_logprobs(whole, targets, rows=rows, temperature=TEMPERATURE, valid_cols=VOCAB)
    loss_of(*expected).backward()

    first, second = run_ranks(2, score_shard, dtype=dtype, shard_cols=shard_cols, inplace=inplace)
    assert first["empty"] == second["empty"] == 0
    for name, values in zip(("logprobs", "entropy"), expected, strict=True):
        assert first[name].tobytes() == second[name].tobytes()
        torch.testing.assert_close(torch.from_numpy(first[name]).double(), values, rtol=1e-6, atol=1e-6)
    grad = torch.cat([torch.from_numpy(first["grad"]), torch.from_numpy(second["grad"])], 1).double()
    torch.testing.assert_close(grad, whole.grad, rtol=tolerance, atol=2e-6)
