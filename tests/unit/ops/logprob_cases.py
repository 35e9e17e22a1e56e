"""Inputs for token_logprobs and their float64 answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgrpo.ops import reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call of token_logprobs and the cotangents of its results."""

    logits: Tensor
    targets: Tensor
    rows: Tensor | None
    temperature: float | Tensor
    valid_cols: int
    g_logprobs: Tensor
    g_entropy: Tensor

    @property
    def arguments(self) -> dict:
        return {"rows": self.rows, "temperature": self.temperature, "valid_cols": self.valid_cols}

    def loss(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return (logprobs * self.g_logprobs).sum() + (entropy * self.g_entropy).sum()

    def oracle(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs, entropy and the gradient of the loss in the logits, all in float64."""
        logits = self.logits.double().requires_grad_()
        logprobs, entropy = reference.token_logprobs(logits, self.targets, **self.arguments)
        (grad,) = torch.autograd.grad(self.loss(logprobs, entropy), logits)
        return logprobs.detach(), entropy.detach(), grad


def make_case(
    *,
    tokens: int = 11,
    cols: int = 1003,
    padding: int = 5,
    dtype: torch.dtype = torch.float32,
    scale: float = 4.0,
    offset: float = 0.0,
    all_rows: bool = False,
) -> Case:
    """Permuted rows, one temperature per token and vocabulary padding, unless told otherwise."""
    n = tokens if all_rows else (tokens + 1) // 2
    return Case(
        logits=(torch.randn(tokens, cols + padding) * scale + offset).to(dtype),
        targets=torch.randint(0, cols, (n,)),
        rows=None if all_rows else torch.randperm(tokens)[:n],
        temperature=torch.rand(n) + 0.5,
        valid_cols=cols,
        g_logprobs=torch.randn(n),
        g_entropy=torch.randn(n),
    )


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest error, absolute below 1 and relative above."""
    return float(((got.double() - expected).abs() / expected.abs().clamp(min=1)).max()) if expected.numel() else 0.0


def check_distant_rows(ops: Any, make_rows: Callable[[], Tensor]) -> None:
    """The raw ops on two rows that are more than 2^31 elements apart, against the same two close together, to the bit.

    make_rows gives such rows, `[2, cols]`, in new memory.
    """
    x, out = make_rows(), make_rows()
    # Where a row begins between two multiples of 16 bytes decides how it is loaded, and so in which order it is summed up.
    near_stride = x.shape[1] + (x.stride(0) - x.shape[1]) % 16
    near, expected_grad = (x.new_full((2, near_stride), torch.nan)[:, : x.shape[1]] for _ in range(2))
    x.copy_(near.copy_(torch.randn(x.shape, device=x.device)))
    valid = x.shape[1] - 3
    targets = torch.tensor([valid - 1, 3], device=x.device)
    inv_temp, g_logprob, g_entropy = torch.tensor([[1.0, 1.5], [1.0, -2.0], [0.5, 0.25]], device=x.device).unbind(0)
    for rows in (None, torch.tensor([1, 0], device=x.device)):
        stats, expected = (ops.logprob_stats(y, targets, rows, 0, valid, inv_temp, True) for y in (x, near))
        assert torch.equal(stats, expected)
    merged = ops.logprob_merge(ops.logprob_stats(near, targets, None, 0, valid, inv_temp, True)[None], inv_temp)[2]
    rest = (targets, None, 0, valid, inv_temp, merged, g_logprob, g_entropy)
    ops.logprob_grad_out(near, expected_grad, *rest)
    # Zeros say nothing about where they were written; of the smallest some are 0 in fp16.
    assert expected_grad.count_nonzero(1).min() > 0.9 * valid

    out.fill_(torch.nan)
    ops.logprob_grad_out(x, out, *rest)
    assert torch.equal(out, expected_grad) and torch.equal(x, near)
    ops.logprob_grad_(x, *rest)
    assert torch.equal(x, expected_grad)
