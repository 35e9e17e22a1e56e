"""Products of an LM head with results wider than its factors, and the gradients of its operands."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """out = a @ b, accumulated and rounded in out's type, which may be wider than that of the factors."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    # No CPU GEMM has a wider result. Wider copies of the factors have the same products.
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def head_gradients(
    chunks: Iterable[tuple[slice, Tensor]],
    hidden: Tensor,
    weight: Tensor,
    *,
    needs: tuple[bool, bool],
    sum_dtype: torch.dtype,
    group: ProcessGroup | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `hidden` and `weight`, from those of the logits `hidden @ weight.T`, some columns at a time.

    The products take the logits' gradient in weight's type, to which it is rounded if it is wider.

    Args:
        chunks: columns, and the gradient of these logits `[n, columns]`; columns that never come have none.
        needs: True to compute hidden's, and weight's.
        sum_dtype: in which hidden's gradient is summed over the chunks and the ranks.
        group: ranks that hold the other columns, all of which must call: one all-reduce of hidden's gradient.
    """
    d_hidden = torch.zeros_like(hidden, dtype=sum_dtype) if needs[0] else None
    d_weight = torch.zeros_like(weight) if needs[1] else None
    for columns, gradient in chunks:
        gradient = gradient.to(weight.dtype)
        if d_hidden is not None:
            _add_product(d_hidden, gradient, weight[columns])
        if d_weight is not None:
            torch.mm(gradient.t(), hidden, out=d_weight[columns])
    if d_hidden is not None:
        if group is not None:
            dist.all_reduce(d_hidden, group=group)
        d_hidden = d_hidden.to(hidden.dtype)
    return d_hidden, d_weight


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be wider than the factors, of which no wider copy is made."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        # No CPU GEMM has a wider result: each chunk's product is rounded once, their sum is not.
        total += torch.mm(a, b)
