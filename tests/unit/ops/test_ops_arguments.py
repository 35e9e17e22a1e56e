"""What token_logprobs refuses, and the words it says."""

from __future__ import annotations

import pytest
import torch

from mgrpo.ops import token_logprobs

X = torch.randn(4, 10)
Y = torch.arange(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": X[0]}, r"logits is \[10\] torch.float32, expected \[tokens, vocab/tp\]"),
        ({"logits": X.int()}, "logits is torch.int32, expected one of torch.float32, torch.bfloat16, torch.float16"),
        ({"logits": torch.randn(10, 4).t()}, r"column stride 4, expected 1.*\.contiguous\(\)"),
        ({"targets": Y[:3]}, r"targets is \[3\] torch.int64, expected \[4\] torch.int64; pass rows"),
        ({"targets": Y.int()}, r"targets is \[4\] torch.int32, expected \[4\] torch.int64"),
        ({"targets": Y - 100}, r"targets reach from -100 to -97, expected ids in \[0, 10\); leave ignored tokens out"),
        ({"targets": Y + 5, "valid_cols": 8}, r"targets reach from 5 to 8, expected ids in \[0, 8\)"),
        ({"rows": Y[:3]}, r"targets is \[4\] torch.int64, expected \[3\]"),
        ({"rows": Y + 1}, r"rows reach from 1 to 4, expected rows of logits, \[0, 4\)"),
        ({"rows": Y // 2}, "rows names a row of logits twice"),
        ({"temperature": 0.0}, "temperature=0.0, expected a finite number > 0"),
        ({"temperature": torch.ones(3)}, r"temperature is \[3\] torch.float32, expected .* shape \[4\]"),
        ({"temperature": torch.tensor([1.0, -1.0, 1, 1])}, "temperature holds -1.0"),
        ({"temperature": torch.ones(4, requires_grad=True)}, "temperature requires grad"),
        ({"valid_cols": 11}, r"valid_cols=11 is outside \[0, 10\]"),
        ({"logits": X.clone().requires_grad_(), "inplace": True}, "would overwrite a leaf tensor"),
        ({"logits": (X[:1].clone().requires_grad_() * 1).expand(4, 10), "inplace": True}, "row stride 0 for 10"),
    ],
)
def test_bad_input_is_refused_with_a_reason(arguments: dict, message: str) -> None:
    """Found here it is a sentence; found later it is a loss that does not fall."""
    with pytest.raises(ValueError, match=message):
        token_logprobs(**{"logits": X, "targets": Y, **arguments})


def test_second_backward_through_overwritten_logits_is_refused() -> None:
    """retain_graph with in place would differentiate the gradient as if it were logits."""
    logits = X.clone().requires_grad_() * 1
    loss = token_logprobs(logits, Y, inplace=True)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward.*use inplace=False"):
        loss.backward()


def test_in_place_is_refused_when_the_producer_still_needs_its_output() -> None:
    """A soft cap on logits (tanh) differentiates through its own output, which in place would have replaced."""
    logits = torch.tanh(X.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        token_logprobs(logits, Y, inplace=True)[0].sum().backward()


def test_gradient_of_the_gradient_is_refused() -> None:
    """There is no double backward; pretending one would return a wrong Hessian."""
    logits = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(token_logprobs(logits, Y)[0].square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
