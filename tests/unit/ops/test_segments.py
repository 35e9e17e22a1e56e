"""segment_sums and segment_mean: sums over the tokens of each sequence, against a loop in Python's floats."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import mgrpo.ops
from mgrpo.ops import per_token, reference, segment_mean, segment_sums

LENGTHS = (3, 0, 1, 300, 8, 5, *range(70))
UNTRAINED = 4
DTYPES = [(torch.float32, 1e-6), (torch.float64, 1e-14)]


def make_segments(
    dtype: torch.dtype = torch.float64, lengths: tuple[int, ...] = LENGTHS
) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and cu_seqlens. A fifth of the tokens, and all of sequence UNTRAINED, has weight 0 over NaN and inf."""
    n = sum(lengths)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    x, weights = torch.randn(n), torch.rand(n) + 0.1
    is_untrained = torch.rand(n) < 0.2
    if len(lengths) > UNTRAINED:
        is_untrained[cu_seqlens[UNTRAINED] : cu_seqlens[UNTRAINED + 1]] = True
    weights[is_untrained] = 0.0
    not_finite = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.arange(n) % 3]
    return torch.where(is_untrained, not_finite, x).to(dtype), weights.to(dtype), cu_seqlens


def python_sums(x: Tensor, weights: Tensor, cu_seqlens: Tensor) -> Tensor:
    totals: tuple[list, list] = ([], [])
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        pairs = [(w, v) for w, v in zip(weights[begin:end].tolist(), x[begin:end].tolist(), strict=True) if w != 0]
        totals[0].append(sum(w * v for w, v in pairs))
        totals[1].append(sum(w for w, _ in pairs))
    return torch.tensor(totals, dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_sums_and_mean_equal_a_loop_over_the_tokens(dtype: torch.dtype, tolerance: float) -> None:
    """GSPO's ratio is such a mean: a token counted in the neighbour's sequence clips the wrong one."""
    x, weights, cu_seqlens = make_segments(dtype)
    expected = python_sums(x, weights, cu_seqlens)
    sums, mean = segment_sums(x, weights, cu_seqlens), segment_mean(x, weights, cu_seqlens)
    assert sums.dtype == mean.dtype == dtype
    torch.testing.assert_close(sums.double(), expected, rtol=tolerance, atol=3 * tolerance)
    has_tokens = expected[1] != 0
    torch.testing.assert_close(
        mean[has_tokens].double(), (expected[0] / expected[1])[has_tokens], rtol=tolerance, atol=3 * tolerance
    )
    assert mean[~has_tokens].count_nonzero() == 0 and not has_tokens[[1, UNTRAINED]].any()


def test_raw_op_equals_the_reference(compiled: None) -> None:
    """A run on a machine without a compiler must be the same run."""
    arguments = make_segments(torch.float32)
    got, expected = torch.ops.mgrpo.segment_sums(*arguments), reference.segment_sums(*arguments)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=3e-6)


def test_gradient_of_the_mean_is_its_derivative() -> None:
    """Finite differences in float64; the gradient of a sequence's ratio reaches its tokens through it."""
    x, weights, cu_seqlens = make_segments(lengths=(3, 0, 1, 4))
    x = x.nan_to_num(0.0, 0.0, 0.0).requires_grad_()
    weights[3] = 0.5
    assert torch.autograd.gradcheck(lambda x: segment_mean(x, weights, cu_seqlens).square(), (x,))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_gradient_of_the_mean_is_zero_where_nothing_is_trained(dtype: torch.dtype, tolerance: float) -> None:
    """0 / 0 of an empty sequence and NaN below a weight of 0 are met on every step; one in a gradient ends the run."""
    x, weights, cu_seqlens = make_segments(dtype)
    x.requires_grad_()
    g = torch.randn(len(LENGTHS), dtype=dtype)
    (grad,) = torch.autograd.grad(segment_mean(x, weights, cu_seqlens), x, g)
    assert grad[weights == 0].count_nonzero() == 0
    _, weight = python_sums(x.detach(), weights, cu_seqlens)
    share = per_token(g.double() / weight, cu_seqlens, len(x)) * weights.double()
    torch.testing.assert_close(grad.double(), torch.where(weights != 0, share, 0.0), rtol=tolerance, atol=tolerance)


def test_nan_of_a_trained_token_shows_in_its_sequence_only() -> None:
    """Hidden it would train on garbage; spread over the pack it would blame the wrong response."""
    for dtype, _ in DTYPES:
        x, weights, cu_seqlens = make_segments(dtype)
        weights[1], x[1] = 1.0, torch.nan
        assert segment_mean(x, weights, cu_seqlens).isnan().nonzero().tolist() == [[0]]


def test_gradient_flows_to_x_alone() -> None:
    """Masks and normalisers are data; a graph behind them would be kept alive for nothing."""
    x, weights, cu_seqlens = make_segments(torch.float32)
    x.requires_grad_()
    assert not segment_sums(x, weights, cu_seqlens).requires_grad
    assert segment_mean(x, weights, cu_seqlens).requires_grad


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_token_is_a_legal_batch(lengths: tuple[int, ...]) -> None:
    """A rank may hold no token of any sequence, and still joins every collective and backward."""
    for dtype, _ in DTYPES:
        x, weights, cu_seqlens = make_segments(dtype, lengths)
        x.requires_grad_()
        assert segment_sums(x, weights, cu_seqlens).tolist() == [[0.0] * len(lengths)] * 2
        mean = segment_mean(x, weights, cu_seqlens)
        mean.sum().backward()
        assert mean.tolist() == [0.0] * len(lengths) and x.grad.shape == (0,)


def test_a_sequence_does_not_depend_on_its_pack() -> None:
    """Packing order must not change a sequence's ratio in any bit, nor may the number of threads."""
    x, weights, cu_seqlens = make_segments(torch.float32)
    whole = segment_sums(x, weights, cu_seqlens)
    for s, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        alone = segment_sums(x[begin:end], weights[begin:end], torch.tensor([0, end - begin], dtype=torch.int32))
        assert torch.equal(alone[:, 0], whole[:, s])
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(segment_sums(x, weights, cu_seqlens), whole)
    finally:
        torch.set_num_threads(threads)


def test_views_are_read_right() -> None:
    """Columns of a table and expanded weights arrive with strides."""
    x, weights, cu_seqlens = make_segments(torch.float32)
    table = torch.stack((x, weights, torch.full_like(x, torch.nan)), 1)
    assert torch.equal(segment_sums(table[:, 0], table[:, 1], cu_seqlens), segment_sums(x, weights, cu_seqlens))
    ones = torch.ones(1).expand(len(x))
    x = x.nan_to_num(0.0, 0.0, 0.0)
    assert torch.equal(segment_mean(x, ones, cu_seqlens), segment_mean(x, ones.clone(), cu_seqlens))


def test_opcheck_accepts_the_op(compiled: None) -> None:
    """A wrong schema or fake shows up as a wrong graph under torch.compile, far from its cause."""
    for lengths in ((3, 0, 9), ()):
        torch.library.opcheck(torch.ops.mgrpo.segment_sums.default, make_segments(torch.float32, lengths))


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiled_graph_equals_eager(compiled: None) -> None:
    """A sequence's ratio is part of the loss, and the loss is compiled in one piece."""
    x, weights, cu_seqlens = make_segments(torch.float32)
    g = torch.randn(len(LENGTHS))
    results = []
    for call in (segment_mean, torch.compile(segment_mean, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        mean = call(leaf, weights, cu_seqlens)
        results.append((mean.detach(), *torch.autograd.grad(mean, leaf, g)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(12, dtype=torch.bfloat16)}, "x has the wrong dtype"),
        ({"weights": torch.zeros(12, dtype=torch.float64)}, "weights has the wrong dtype"),
        ({"weights": torch.zeros(11)}, "weights must have 12 elements, got 11"),
        ({"weights": torch.zeros(24)[::2]}, "weights must be contiguous"),
        ({"cu_seqlens": torch.tensor([0, 3, 3, 12])}, "cu_seqlens has the wrong dtype"),
        ({"cu_seqlens": torch.tensor([0, 3, 3, 13]).int()}, "cu_seqlens must reach from 0 to 12, got 0 to 13"),
        ({"cu_seqlens": torch.tensor([1, 3, 3, 12]).int()}, "cu_seqlens must reach from 0 to 12, got 1 to 12"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 12]).int()}, r"cu_seqlens\[2\]=3 is below 5"),
        ({"cu_seqlens": torch.zeros(0).int()}, r"cu_seqlens must be \[num_seqs \+ 1\], got no element"),
    ],
)
def test_raw_op_refuses_what_would_read_foreign_memory(compiled: None, changes: dict, message: str) -> None:
    """Nobody should call it like this; if somebody does, it must not end in a crash or in garbage."""
    names = ("x", "weights", "cu_seqlens")
    arguments = dict(zip(names, make_segments(torch.float32, (3, 0, 9)), strict=True)) | changes
    with pytest.raises(RuntimeError, match=message):
        torch.ops.mgrpo.segment_sums(*arguments.values())


def test_a_value_a_sequence_reaches_each_of_its_tokens() -> None:
    """Advantages and lengths are spread this way; empty sequences must not shift those behind them."""
    cu_seqlens = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    assert mgrpo.ops.per_token(torch.tensor([5.0, 6.0, 7.0]), cu_seqlens, 3).tolist() == [5.0, 5.0, 7.0]
