"""Kept sets for the tests of the ops, and a problem for both heads with its float64 answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mgrpo.ops import KeptSets, linear_logprobs, reference, token_logprobs

HIDDEN = 24
# A value is fp32 from the logits on. The dot products of bf16 and fp16 are rounded once, as those of a GEMM.
VALUE_TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-2, torch.float16: 6e-3}
GRAD_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 5e-2, torch.float16: 6e-3}


def make_sets(targets: Tensor, sizes: Tensor, vocab: int) -> KeptSets:
    """A random set of each size `[n]`, in random order, with its target among them."""
    sets = []
    for target, size in zip(targets.tolist(), sizes.tolist(), strict=True):
        others = torch.randperm(vocab)
        ids = torch.cat((torch.tensor([target]), others[others != target][: size - 1]))
        sets.append(ids[torch.randperm(len(ids))])
    ids = torch.cat([torch.empty(0), *sets]).int()
    return KeptSets(ids, torch.cat((torch.zeros(1), torch.tensor([len(s) for s in sets]).cumsum(0))).int())


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Logits `[tokens, cols]`, or the factors they are the product of, the sets, and the cotangents of the results."""

    operands: tuple[Tensor, ...]
    """`(logits,)`, or `(hidden, weight)`, with padding columns, which hold NaN."""
    targets: Tensor
    kept: KeptSets
    rows: Tensor | None
    temperature: float | Tensor
    valid_cols: int
    g_logprobs: Tensor
    g_entropy: Tensor

    def run(self, *, inplace: bool = False, kept: KeptSets | None = None, **options) -> tuple[Tensor, ...]:
        """Logprobs, entropy, and the gradient in each operand."""
        leaves = [x.clone().requires_grad_() for x in self.operands]
        arguments = {
            "temperature": self.temperature,
            "valid_cols": self.valid_cols,
            "kept": self.kept if kept is None else kept,
            "with_entropy": True,
            **options,
        }
        if len(leaves) == 1:
            results = token_logprobs(leaves[0] * 1, self.targets, rows=self.rows, inplace=inplace, **arguments)
        else:
            results = linear_logprobs(*leaves, self.targets, logits_chunk=64, **arguments)
        return *(x.detach() for x in results), *torch.autograd.grad(self.loss(*results), leaves)

    def loss(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return (logprobs * self.g_logprobs).sum() + (entropy * self.g_entropy).sum()

    def oracle(self) -> tuple[Tensor, ...]:
        """The same from a softmax over masked rows, in float64 and by autograd."""
        leaves = [x.double().requires_grad_() for x in self.operands]
        logits = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1][: self.valid_cols].t()
        results = reference.token_logprobs(
            logits,
            self.targets,
            rows=self.rows,
            temperature=self.temperature,
            valid_cols=self.valid_cols,
            kept=self.kept,
        )
        return *(x.detach() for x in results), *torch.autograd.grad(self.loss(*results), leaves)


def make_problem(
    head: str,
    *,
    n: int = 11,
    cols: int = 203,
    padding: int = 5,
    dtype: torch.dtype = torch.float32,
    sizes: Tensor | None = None,
) -> Problem:
    """head: "logits", of which some rows are scored, in another order, or "linear".

    A temperature for each target; sizes up to 20 unless given, of which some are 1.
    """
    if head == "logits":
        logits = torch.randn(n + 3, cols + padding).mul(4)
        logits[:, cols:] = torch.nan
        operands = (logits.to(dtype),)
    else:
        weight = torch.randn(cols + padding, HIDDEN).mul(2 / HIDDEN**0.5)
        weight[cols:] = torch.nan
        operands = torch.randn(n, HIDDEN).to(dtype), weight.to(dtype)
    targets = torch.randint(0, cols, (n,))
    if sizes is None:
        sizes = torch.randint(1, min(cols, 20) + 1, (n,))
        sizes[::4] = 1
    return Problem(
        operands=operands,
        targets=targets,
        kept=make_sets(targets, sizes, cols),
        rows=torch.randperm(n + 3)[:n] if head == "logits" else None,
        temperature=torch.rand(n) + 0.5,
        valid_cols=cols,
        g_logprobs=torch.randn(n),
        g_entropy=torch.randn(n),
    )
