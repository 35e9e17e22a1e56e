"""An LM head of 16-bit operands with fp32 logits: against float64 on the same operands, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from logprob_cases import relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgrpo.ops import KeptSets, kept_tokens, linear, linear_logits, linear_logprobs, reference, token_logprobs

N, HIDDEN, VOCAB = 64, 96, 500
Head = Callable[..., tuple[Tensor, Tensor | None]]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, *, fp32_logits: bool) -> tuple[Tensor, Tensor | None]:
    return linear_logprobs(hidden, weight, targets, with_entropy=True, logits_chunk=170, fp32_logits=fp32_logits)


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, *, fp32_logits: bool) -> tuple[Tensor, Tensor | None]:
    dtype = torch.float32 if fp32_logits else hidden.dtype
    return token_logprobs(linear_logits(hidden, weight, dtype=dtype), targets, with_entropy=True, inplace=True)


HEADS = pytest.mark.parametrize("head", [whole, chunked])


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden, weight and targets; logits of standard deviation 4, as a trained model's."""
    hidden, weight = torch.randn(N, HIDDEN), torch.randn(VOCAB, HIDDEN) * (4 / HIDDEN**0.5)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), torch.randint(0, VOCAB, (N,))


def run(head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, *, fp32_logits: bool = True) -> tuple[Tensor, ...]:
    """Logprobs, entropy and the gradients in hidden and weight."""
    logprobs, entropy = head(hidden, weight, targets, fp32_logits=fp32_logits)
    grads = torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), (hidden, weight))
    return logprobs.detach(), entropy.detach(), *grads


def oracle(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logprobs, entropy = reference.token_logprobs(wide[0] @ wide[1].t(), targets)
    grads = torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), wide)
    return logprobs.detach(), entropy.detach(), *grads


@HEADS
def test_the_head_no_longer_rounds(head: Head) -> None:
    """A bf16 logit near 10 is off by up to 2^-6, and so is the ratio of two policies that differ by less."""
    case = operands()
    exact = oracle(*case)
    wide, narrow = run(head, *case), run(head, *case, fp32_logits=False)
    errors = [(found[0] - exact[0]).abs().max().item() for found in (wide, narrow)]
    print(f"largest error of a logprob: {errors[0]:.1e} with fp32 logits, {errors[1]:.1e} without")
    assert errors[0] < 1e-5 and errors[1] > 1e-2
    assert (wide[1] - exact[1]).abs().max() < 1e-5
    # Rounded to bf16 as a gradient of the logits, after each chunk's product, and as results.
    for got, other, expected in zip(wide[2:], narrow[2:], exact[2:], strict=True):
        assert got.dtype == torch.bfloat16
        assert relative_error(got, expected) < 2e-2
        assert (got - expected).norm() < (other - expected).norm()


@pytest.mark.parametrize("wide_entries", [7, 4096])
def test_the_head_of_kept_sets_does_not_round(monkeypatch: pytest.MonkeyPatch, wide_entries: int) -> None:
    """With top_k the chunked head computes single dot products, whose rounding is that of a logit."""
    monkeypatch.setattr(kept_tokens, "WIDE_ENTRIES", wide_entries)
    hidden, weight, targets = operands()
    ids = torch.stack((targets, (targets + 7) % VOCAB, (targets + 130) % VOCAB), 1).sort(1).values
    sets = KeptSets(ids=ids.flatten().int(), offsets=3 * torch.arange(N + 1, dtype=torch.int32))

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, *, fp32_logits: bool) -> tuple[Tensor, Tensor | None]:
        return linear_logprobs(
            hidden, weight, targets, with_entropy=True, logits_chunk=170, fp32_logits=fp32_logits, kept=sets
        )

    wide_operands = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    masked = torch.full((N, VOCAB), -torch.inf, dtype=torch.float64).scatter(1, ids, 0.0)
    distribution = (wide_operands[0] @ wide_operands[1].t() + masked).log_softmax(-1)
    exact = distribution.gather(1, targets[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution.masked_fill(masked < 0, 0.0)).sum(1)
    grads = torch.autograd.grad(exact.sum() + 0.1 * entropy.sum(), wide_operands)
    wide, narrow = (run(head, hidden, weight, targets, fp32_logits=on) for on in (True, False))
    assert (wide[0] - exact).abs().max() < 1e-5 < 1e-3 < (narrow[0] - exact).abs().max()
    for got, expected in zip(wide[2:], grads, strict=True):
        assert got.dtype == torch.bfloat16 and relative_error(got, expected) < 2e-2


@HEADS
def test_fp32_operands_are_not_touched(head: Head) -> None:
    """The setting must not make another run of one that is in fp32 already."""
    case = operands(torch.float32)
    for got, expected in zip(run(head, *case), run(head, *case, fp32_logits=False), strict=True):
        assert torch.equal(got, expected)


def test_columns_of_the_gradient_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large vocabulary goes backward in parts; one left out or counted twice trains another head."""
    case = operands()
    at_once = run(whole, *case)
    monkeypatch.setattr(linear, "GRADIENT_COLUMNS", 170)
    for got, expected in zip(run(whole, *case), at_once, strict=True):
        assert relative_error(got, expected.double()) < 1e-2
    assert torch.equal(run(whole, *case)[3], at_once[3])  # each row is of one part


def test_no_row_is_legal() -> None:
    """A rank whose micro-batch has no response token still takes part."""
    hidden, weight, targets = operands()
    none = hidden[:0].detach().requires_grad_()
    for head in (whole, chunked):
        results = run(head, none, weight, targets[:0])
        assert [result.numel() for result in results[:3]] == [0, 0, 0] and not results[3].any()


def test_frozen_head_gets_no_gradient() -> None:
    """With a frozen base the largest gradient of the step would be computed for nothing."""
    hidden, weight, _ = operands()
    logits = linear_logits(hidden, weight.detach(), dtype=torch.float32)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert hidden.grad is not None and weight.grad is None


class NewBytes(TorchDispatchMode):
    """Bytes of the largest tensor that an operation made."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max(self.largest, *(own.nbytes() for own in made if own.data_ptr() not in self.known), 0)
        return result


def test_chunks_stay_bounded_in_fp32() -> None:
    """The memory plan counts on it: fp32 logits of a chunk, never of the vocabulary."""
    n, vocab, chunk = 96, 4096, 256
    hidden, targets = torch.randn(n, 8).bfloat16().requires_grad_(), torch.randint(0, vocab, (n,))
    weight = torch.randn(vocab, 8).bfloat16().requires_grad_()
    with NewBytes(hidden, weight) as made:
        logprobs, _ = linear_logprobs(hidden, weight, targets, logits_chunk=chunk, fp32_logits=True)
        logprobs.sum().backward()
    # A few times a chunk in fp32 where the ops are not compiled.
    assert n * chunk * 4 <= made.largest <= n * chunk * 8 < n * vocab * 2


def test_backward_of_whole_logits_makes_no_second_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient overwrites the fp32 logits; their copy in bf16 would be half as large again."""
    monkeypatch.setattr(linear, "GRADIENT_COLUMNS", 256)
    n, vocab = 96, 4096
    hidden, targets = torch.randn(n, 8).bfloat16().requires_grad_(), torch.randint(0, vocab, (n,))
    weight = torch.randn(vocab, 8).bfloat16().requires_grad_()
    logits = linear_logits(hidden, weight, dtype=torch.float32)
    loss = token_logprobs(logits, targets, inplace=True)[0].sum()
    with NewBytes(hidden, weight, logits) as made:
        loss.backward()
    assert made.largest <= max(n * 256 * 2, weight.nbytes)


def test_operands_that_do_not_fit_are_named() -> None:
    hidden, weight, _ = operands()
    with pytest.raises(ValueError, match=r"weight is \[96, 500\] torch.bfloat16, expected \[vocab/tp, 96\]"):
        linear_logits(hidden, weight.t(), dtype=torch.float32)
