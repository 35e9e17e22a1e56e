"""The likeliest tokens of each row against sorted log-softmaxes in float64: both heads, chunks, kept sets, few tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kept_cases import VALUE_TOLERANCE, Problem, make_problem
from logprob_cases import relative_error
from torch import Tensor

from mgrpo.ops import linear_likeliest, token_likeliest


def logprobs_of(problem: Problem) -> Tensor:
    """Log-probabilities `[n, vocab]` in float64; -inf outside the kept sets."""
    operands = [x.double() for x in problem.operands]
    logits = operands[0] if len(operands) == 1 else operands[0] @ operands[1].t()
    logits = logits[:, : problem.valid_cols]
    if problem.kept is not None:
        is_kept = torch.zeros_like(logits, dtype=torch.bool)
        is_kept[problem.kept.entry_targets(), problem.kept.ids.long()] = True
        logits = logits.masked_fill(~is_kept, -torch.inf)
    return (logits / problem.temperature.double()[:, None]).log_softmax(1)


def likeliest(problem: Problem, k: int, **options) -> tuple[Tensor, Tensor, Tensor]:
    arguments = {"temperature": problem.temperature, "valid_cols": problem.valid_cols, "kept": problem.kept, **options}
    if len(problem.operands) == 1:
        return token_likeliest(*problem.operands, problem.targets, k, **arguments)
    return linear_likeliest(*problem.operands, problem.targets, k, logits_chunk=64, **arguments)


def problem_of(head: str, *, is_cut: bool, **options) -> Problem:
    problem = make_problem(head, **options)
    if problem.rows is not None:
        problem = dataclasses.replace(problem, operands=(problem.operands[0][problem.rows],), rows=None)
    return problem if is_cut else dataclasses.replace(problem, kept=None)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "kept"])
@pytest.mark.parametrize("head", ["logits", "linear"])
@pytest.mark.parametrize("dtype", VALUE_TOLERANCE)
@pytest.mark.parametrize(("cols", "k"), [(203, 1), (203, 7), (203, 100), (5, 8)])
def test_the_likeliest_tokens_are_those_of_the_sorted_distribution(
    head: str, is_cut: bool, dtype: torch.dtype, cols: int, k: int
) -> None:
    """A teacher that points at the wrong tokens teaches another distribution; where it has fewer it must say so."""
    problem = problem_of(head, is_cut=is_cut, cols=cols, dtype=dtype)
    logprobs, ids, values = likeliest(problem, k)
    every = logprobs_of(problem)
    assert relative_error(logprobs, every.gather(1, problem.targets[:, None])[:, 0]) < VALUE_TOLERANCE[dtype]
    expected = torch.nn.functional.pad(every.sort(1, descending=True).values, (0, k), value=-torch.inf)[:, :k]
    is_token = expected > -torch.inf
    assert torch.equal(ids >= 0, is_token) and torch.equal(values.isfinite(), is_token)
    assert relative_error(values[is_token], expected[is_token]) < VALUE_TOLERANCE[dtype]
    assert relative_error(values[is_token], every.gather(1, ids.clamp(min=0))[is_token]) < VALUE_TOLERANCE[dtype]
    for row in ids.tolist():
        named = [token for token in row if token >= 0]
        assert len(set(named)) == len(named)


@pytest.mark.parametrize("head", ["logits", "linear"])
def test_no_row_gives_nothing(head: str) -> None:
    """A rank without data meets the others all the same."""
    problem = problem_of(head, is_cut=False, n=0)
    assert [tuple(x.shape) for x in likeliest(problem, 3)] == [(0,), (0, 3), (0, 3)]
