"""Logprobs of several tokens of a row against a log-softmax in float64: both heads, whole or of kept sets, and gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kept_cases import GRAD_TOLERANCE, VALUE_TOLERANCE, Problem, make_problem
from logprob_cases import relative_error
from torch import Tensor

from mgrpo.ops import KeptSets, linear_logprobs, token_logprobs
from mgrpo.ops.logprobs import _TokenLogprobs

HEADS = ("logits", "linear")
CUTS = {"whole": False, "kept": True}
K = 6


def make(head: str, *, is_cut: bool, k: int = K, **options) -> tuple[Problem, Tensor]:
    """A problem whose targets have candidates, and cotangents `[n, 1 + k]`.

    Among the candidates are tokens of the set, others, none (-1) and in every second row the target itself.
    """
    problem = make_problem(head, **options)
    n = len(problem.targets)
    candidates = torch.rand(n, problem.valid_cols).argsort(1)[:, :k]
    for row, (first, last) in enumerate(zip(problem.kept.offsets, problem.kept.offsets[1:], strict=False)):
        members = problem.kept.ids[first:last].long()
        row_of = [token for token in candidates[row].tolist() if token not in members.tolist()]
        own = members[members != problem.targets[row]][: k // 2]
        candidates[row] = torch.tensor([*own.tolist(), *row_of])[:k]
    candidates[::3, -1] = -1
    candidates[::2, 0] = problem.targets[::2]
    for row, target in zip(candidates, problem.targets, strict=True):
        row[1:][row[1:] == target] = -1
    problem = dataclasses.replace(problem, targets=torch.cat((problem.targets[:, None], candidates), 1))
    return problem if is_cut else dataclasses.replace(problem, kept=None), torch.randn(n, 1 + k)


def run(problem: Problem, g: Tensor, *, dtype: torch.dtype | None = None, inplace: bool = False) -> tuple[Tensor, ...]:
    """Logprobs, entropy, and the gradient in each operand."""
    leaves = [x.to(dtype or x.dtype).requires_grad_() for x in problem.operands]
    options = {"temperature": problem.temperature, "valid_cols": problem.valid_cols, "kept": problem.kept}
    if len(leaves) == 1:
        results = token_logprobs(
            leaves[0] * 1, problem.targets, rows=problem.rows, with_entropy=True, inplace=inplace, **options
        )
    else:
        results = linear_logprobs(*leaves, problem.targets, logits_chunk=64, with_entropy=True, **options)
    return *(x.detach() for x in results), *torch.autograd.grad(loss(problem, g, *results), leaves)


def loss(problem: Problem, g: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
    return (g * logprobs.where(logprobs > -torch.inf, 0.0)).sum() + (entropy * problem.g_entropy).sum()


def oracle(problem: Problem, g: Tensor) -> tuple[Tensor, ...]:
    """The same of whole rows in float64, by autograd."""
    leaves = [x.double().requires_grad_() for x in problem.operands]
    x = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1][: problem.valid_cols].t()
    x = (x if problem.rows is None else x[problem.rows])[:, : problem.valid_cols]
    if problem.kept is not None:
        is_kept = torch.zeros_like(x, dtype=torch.bool)
        is_kept[problem.kept.entry_targets(), problem.kept.ids.long()] = True
        x = x.masked_fill(~is_kept, -torch.inf)
    every = (x / torch.as_tensor(problem.temperature).double().reshape(-1, 1)).log_softmax(1)
    logprobs = every.gather(1, problem.targets.clamp(min=0)).where(problem.targets >= 0, -torch.inf)
    entropy = -(every.exp() * every.where(every > -torch.inf, 0.0)).sum(1)
    grads = torch.autograd.grad(loss(problem, g, logprobs, entropy), leaves)
    return logprobs.detach(), entropy.detach(), *grads


def check(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], values: float, gradients: float) -> None:
    is_token = expected[0] > -torch.inf
    assert torch.equal(results[0] > -torch.inf, is_token)
    assert relative_error(results[0][is_token], expected[0][is_token]) < values
    assert relative_error(results[1], expected[1]) < values
    for got, want in zip(results[2:], expected[2:], strict=True):
        assert relative_error(got, want) < gradients


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", VALUE_TOLERANCE)
def test_candidates_equal_a_log_softmax(head: str, cut: str, dtype: torch.dtype) -> None:
    """A divergence pulls at each of these tokens: a wrong column, or one written twice, teaches another distribution."""
    problem, g = make(head, is_cut=CUTS[cut], dtype=dtype)
    check(run(problem, g), oracle(problem, g), VALUE_TOLERANCE[dtype], GRAD_TOLERANCE[dtype])


@pytest.mark.parametrize("cut", CUTS)
def test_in_float64_the_gradient_is_exact(cut: str) -> None:
    """What float32 rounds hides what a formula leaves out."""
    problem, g = make("linear", is_cut=CUTS[cut])
    problem = dataclasses.replace(problem, operands=tuple(x.double() for x in problem.operands))
    check(run(problem, g.double(), dtype=torch.float64), oracle(problem, g.double()), 1e-12, 1e-12)


def test_in_float64_the_gradient_of_whole_logits_is_exact() -> None:
    """`token_logprobs` takes no float64; its parts do."""
    problem, g = make("logits", is_cut=False)
    leaf = problem.operands[0].double().requires_grad_()
    targets, candidates = problem.targets[:, 0].contiguous(), problem.targets[:, 1:].contiguous()
    inverse = 1 / problem.temperature.double()
    first, entropy, others = _TokenLogprobs.apply(
        leaf, targets, candidates, problem.rows, inverse, 0, problem.valid_cols, None, True, False
    )
    logprobs = torch.cat((first[:, None], others), 1)
    (gradient,) = torch.autograd.grad(loss(problem, g.double(), logprobs, entropy), leaf)
    check((logprobs.detach(), entropy.detach(), gradient), oracle(problem, g.double()), 1e-12, 1e-12)


def test_a_certain_tokens_gradient_is_as_precise_as_without_candidates() -> None:
    """Its p is almost 1: as the difference of two numbers rounded to bf16, what is left of its gradient would be noise."""
    problem, g = make("logits", is_cut=False, dtype=torch.bfloat16)
    logits = torch.zeros_like(problem.operands[0])
    logits[:, 5] = 10.0
    problem = dataclasses.replace(problem, operands=(logits,), temperature=1.0, g_entropy=torch.zeros(len(g)))
    problem.targets[:, 0] = 5
    g[:, 1:] = 0
    gradients, exact = run(problem, g)[2], oracle(problem, g)[2]
    assert 0 < exact[:, 5].abs().max() < 0.1
    torch.testing.assert_close(gradients[:, 5].double(), exact[:, 5], rtol=1e-2, atol=0)


@pytest.mark.parametrize("cut", CUTS)
def test_in_place_equals_a_new_buffer_bitwise(cut: str) -> None:
    """In place saves memory; it must not be another training run."""
    problem, g = make("logits", is_cut=CUTS[cut], dtype=torch.bfloat16)
    for got, expected in zip(run(problem, g, inplace=True), run(problem, g), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("head", HEADS)
def test_the_targets_logprob_does_not_depend_on_candidates(head: str, cut: str) -> None:
    """The ratio of a step is the same whether there is a teacher or not."""
    problem, g = make(head, is_cut=CUTS[cut])
    alone = dataclasses.replace(problem, targets=problem.targets[:, 0].contiguous())
    options = {"temperature": problem.temperature, "valid_cols": problem.valid_cols, "kept": problem.kept}
    op, others = (
        (token_logprobs, {"rows": problem.rows}) if head == "logits" else (linear_logprobs, {"logits_chunk": 64})
    )
    expected = op(*alone.operands, alone.targets, with_entropy=True, **others, **options)
    got = run(problem, g)
    assert torch.equal(got[0][:, 0], expected[0]) and torch.equal(got[1], expected[1])


def test_rows_without_cotangent_are_zero_whatever_they_hold() -> None:
    """An overflow in a prompt's last row, or beside a token that is not trained, must not reach the others."""
    logits = torch.randn(4, 9)
    logits[1, 3], logits[2, 0] = torch.nan, torch.inf
    logits.requires_grad_()
    targets = torch.tensor([[0, 3, -1]] * 4)
    for kept in (None, KeptSets(torch.tensor([3, 0] * 4).int(), torch.tensor([0, 2, 4, 6, 8]).int())):
        logprobs, entropy = token_logprobs(logits, targets, kept=kept, with_entropy=True)
        (grad,) = torch.autograd.grad((logprobs[0, 1], entropy[3]), logits)
        assert grad.isfinite().all() and grad[[1, 2]].count_nonzero() == 0
        assert grad[0].count_nonzero() == (9 if kept is None else 2)


@pytest.mark.parametrize("head", HEADS)
def test_no_row_has_no_gradient(head: str) -> None:
    """A rank without data calls the ops all the same."""
    problem, g = make(head, is_cut=False, n=0)
    logprobs, entropy, *gradients = run(problem, g)
    assert logprobs.shape == (0, 1 + K) and entropy.shape == (0,)
    assert all(gradient.count_nonzero() == 0 for gradient in gradients)


@pytest.mark.parametrize("head", HEADS)
def test_a_candidate_of_another_vocabulary_is_refused(head: str) -> None:
    """It would be read from padding, or beyond the row."""
    problem, g = make(head, is_cut=False)
    problem.targets[2, 3] = problem.valid_cols
    with pytest.raises(ValueError, match=r"reach from -1 to 203, expected ids below 203, or -1 for none"):
        run(problem, g)
