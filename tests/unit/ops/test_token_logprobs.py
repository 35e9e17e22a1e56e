"""token_logprobs against float64: values, gradients, odd shapes, extreme logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from logprob_cases import Case, make_case, relative_error

from mgrpo.ops import token_logprobs
from mgrpo.ops.logprobs import DTYPES

# Forward accumulates in fp32 whatever the logits are; a gradient is rounded to their type once, when it is stored.
VALUE_TOLERANCE = 1e-6
GRAD_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def run(case: Case, *, inplace: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs, entropy and the gradient in the logits."""
    leaf = case.logits.clone().requires_grad_()
    logits = leaf * 1
    logprobs, entropy = token_logprobs(logits, case.targets, **case.arguments, with_entropy=True, inplace=inplace)
    (grad,) = torch.autograd.grad(case.loss(logprobs, entropy), leaf)
    return logprobs.detach(), entropy.detach(), grad


def check_against_float64(case: Case) -> None:
    logprobs, entropy, grad = run(case)
    expected_logprobs, expected_entropy, expected_grad = case.oracle()
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert relative_error(logprobs, expected_logprobs) < VALUE_TOLERANCE
    assert relative_error(entropy, expected_entropy) < VALUE_TOLERANCE
    assert relative_error(grad, expected_grad) < GRAD_TOLERANCE[case.logits.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("cols", [1, 2, 7, 64, 1003, 2048, 5001])
def test_values_and_gradient_equal_float64(dtype: torch.dtype, all_rows: bool, cols: int) -> None:
    """A wrong logprob is a wrong ratio, a wrong gradient a wrong step; the widths cross every vector and block size."""
    check_against_float64(make_case(cols=cols, dtype=dtype, all_rows=all_rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "offset"), [(60.0, -500.0), (1.0, 1e4), (1e4, 0.0), (1.0, -1e4)])
def test_extreme_logits_lose_no_accuracy(dtype: torch.dtype, scale: float, offset: float) -> None:
    """A model early in training, or a large one late, has logits far from zero; log-sum-exp must not cancel there."""
    check_against_float64(make_case(dtype=dtype, scale=scale, offset=offset))


@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_infinity_logits_have_no_mass_and_no_gradient(dtype: torch.dtype) -> None:
    """Masked tokens arrive as -inf; 0 * inf inside the entropy would make the whole step NaN."""
    case = make_case(cols=5001, dtype=dtype)
    case.logits[:, :4500] = -torch.inf  # whole blocks, and parts of one
    case = dataclasses.replace(case, targets=case.targets % 500 + 4500)
    check_against_float64(case)
    assert torch.equal(run(case)[2][:, :4500], torch.zeros(case.logits.shape[0], 4500, dtype=dtype))


def test_nan_and_inf_logits_show_in_the_result() -> None:
    """The trainer skips a step whose loss is not finite; an op that hides a NaN would train on garbage."""
    for bad in (torch.nan, torch.inf):
        logits = torch.full((4, 5000), -torch.inf)
        logits[:, 4000] = 1.0
        logits[1, 3] = bad
        logprobs, entropy = token_logprobs(logits, torch.full((4,), 4000), with_entropy=True)
        assert torch.isnan(logprobs).tolist() == [False, True, False, False]
        assert torch.isnan(entropy).tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_logits_and_in_cotangents_shows_in_the_gradient(dtype: torch.dtype) -> None:
    """A NaN that rounding turns into a number is a step on garbage."""
    logits = torch.randn(2, 300, dtype=dtype)
    logits[1, 7] = torch.nan
    logits.requires_grad_()
    token_logprobs(logits, torch.tensor([1, 2]))[0].sum().backward()
    assert torch.isfinite(logits.grad[0]).all() and torch.isnan(logits.grad[1]).all()

    # A NaN whose bits are all ones turns into -0 when it is rounded to bf16 like a number.
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    logits = torch.randn(1, 300, dtype=dtype, requires_grad=True)
    token_logprobs(logits, torch.tensor([1]))[0].backward(nan)
    assert torch.isnan(logits.grad).all()


def test_every_float16_is_read_and_rounded_as_torch_does(compiled: None) -> None:
    """Loss scaling lives off the edges: subnormal gradients must survive, and those too large must become infinite."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    one = torch.ones(1)
    # The statistics of one column hold it as it was read.
    column, first = every[:, None].contiguous(), torch.zeros(2**16, dtype=torch.int64)
    read = torch.ops.mgrpo.logprob_stats(column, first, None, 0, 1, one, False)[3]
    assert torch.equal(read.view(torch.int32)[~every.isnan()], every.float().view(torch.int32)[~every.isnan()])
    assert read[every.isnan()].isnan().all()

    # Two equal logits: each column's gradient is half of the cotangent, which is any float32 between its neighbours.
    finite = every[every.isfinite()].float()
    halves = torch.cat([finite, (finite + finite.roll(1)) / 2, finite * 1.0003, torch.tensor([65519.9, 65520.0, 1e30])])
    logits = torch.zeros(len(halves), 2, dtype=torch.float16, requires_grad=True)
    logprobs, _ = token_logprobs(logits, torch.zeros(len(halves), dtype=torch.int64))
    (grad,) = torch.autograd.grad(logprobs, logits, 2 * halves)
    assert torch.equal(grad, torch.stack((halves, -halves), 1).half())


@pytest.mark.parametrize("n", [0, 1])
def test_no_token_and_one_token_are_legal(n: int) -> None:
    """A rank whose micro-batch has no response token still takes part, with a gradient of zeros."""
    logits = torch.randn(3, 17, requires_grad=True)
    rows = torch.tensor([2])[:n]
    logprobs, entropy = token_logprobs(logits, torch.tensor([5])[:n], rows=rows, with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    expected = torch.log_softmax(logits.detach(), 1)[rows, 5]
    torch.testing.assert_close(logprobs, expected)
    assert logits.grad[: 3 - n].count_nonzero() == 0
    empty = torch.empty(0, 17, requires_grad=True)
    token_logprobs(empty, torch.empty(0, dtype=torch.int64))[0].sum().backward()
    assert empty.grad.shape == (0, 17)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_start_anywhere_in_memory(dtype: torch.dtype) -> None:
    """Logits may be a slice of a wider buffer, so that rows start on odd addresses and the new gradient does not."""
    case = make_case(cols=777, dtype=dtype)
    wide = torch.full((case.logits.shape[0], case.logits.shape[1] + 7), torch.nan, dtype=dtype)
    wide[:, 3:-4] = case.logits
    view = wide[:, 3:-4].requires_grad_()
    logprobs, entropy = token_logprobs(view, case.targets, **case.arguments, with_entropy=True)
    (grad,) = torch.autograd.grad(case.loss(logprobs, entropy), view)
    for got, expected in zip((logprobs, entropy, grad), run(case), strict=True):
        assert torch.equal(got, expected)


def test_padding_columns_are_never_read() -> None:
    """Megatron pads the vocabulary; padding inside the softmax made logprobs jump and rewards collapse elsewhere."""
    case = make_case(padding=64)
    poisoned = dataclasses.replace(case, logits=case.logits.clone())
    poisoned.logits[:, case.valid_cols :] = torch.nan
    for got, expected in zip(run(poisoned), run(case), strict=True):
        assert torch.equal(got, expected)
    assert run(poisoned)[2][:, case.valid_cols :].count_nonzero() == 0


def test_unselected_rows_get_zero_gradient() -> None:
    """Prompt rows carry no loss; whatever lies in a fresh gradient buffer there would flow into the LM head."""
    case = make_case()
    is_selected = torch.zeros(case.logits.shape[0], dtype=torch.bool)
    is_selected[case.rows] = True
    grad = run(case)[2]
    assert grad[~is_selected].count_nonzero() == 0
    assert (grad[is_selected].count_nonzero(1) > 0).all()


def test_rows_without_cotangent_are_zero_even_when_they_hold_nan() -> None:
    """Tokens outside the loss mask must not matter, also when they overflowed."""
    logits = torch.randn(3, 100)
    logits[1] = torch.nan
    logits.requires_grad_()
    logprobs, _ = token_logprobs(logits, torch.tensor([1, 2, 3]))
    (grad,) = torch.autograd.grad(logprobs, logits, torch.tensor([1.0, 0.0, 1.0]))
    assert torch.isfinite(grad).all() and grad[1].count_nonzero() == 0


@pytest.mark.parametrize("temperature", [0.6, 1, 2.5])
def test_one_temperature_for_all_equals_the_same_for_each(temperature: float) -> None:
    """Rollout and trainer must divide by the same temperature, however it is given."""
    case = make_case()
    each = dataclasses.replace(case, temperature=torch.full_like(case.g_logprobs, temperature))
    one = dataclasses.replace(case, temperature=temperature)
    check_against_float64(one)
    for got, expected in zip(run(one), run(each), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_equals_a_new_buffer_bitwise(dtype: torch.dtype) -> None:
    """In place saves memory; it must not be another training run."""
    case = make_case(dtype=dtype, cols=2500)
    for got, expected in zip(run(case, inplace=True), run(case), strict=True):
        assert torch.equal(got, expected)


def test_in_place_gradient_lives_in_the_logits() -> None:
    """The memory plan counts on one buffer; a hidden copy would run out of memory on a large vocabulary."""
    leaf = torch.randn(4, 33, requires_grad=True)
    logits = leaf * 1
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    token_logprobs(logits, torch.arange(4), inplace=True)[0].sum().backward()
    assert seen == [logits.data_ptr()]


def test_results_repeat_bitwise_and_do_not_depend_on_threads() -> None:
    """Exact resume needs the same numbers from the same inputs, on any number of threads."""
    case = make_case(tokens=64, cols=3001)
    first = run(case)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for got, expected in zip(run(case), first, strict=True):
                assert torch.equal(got, expected)
    finally:
        torch.set_num_threads(threads)


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Packing order must not change a token's logprob."""
    case = make_case(tokens=9, all_rows=True)
    whole = run(case)
    for i in range(9):
        alone = dataclasses.replace(
            case,
            logits=case.logits[i : i + 1],
            targets=case.targets[i : i + 1],
            temperature=case.temperature[i : i + 1],
            g_logprobs=case.g_logprobs[i : i + 1],
            g_entropy=case.g_entropy[i : i + 1],
        )
        for got, expected in zip(run(alone), whole, strict=True):
            assert torch.equal(got[0], expected[i])


def test_unused_entropy_does_not_change_the_gradient() -> None:
    """Entropy is often only a metric; asking for it must leave the step as it was, and cost nothing in backward."""
    case = make_case()
    grads = []
    for with_entropy in (False, True):
        logits = case.logits.clone().requires_grad_()
        logprobs, entropy = token_logprobs(logits, case.targets, **case.arguments, with_entropy=with_entropy)
        assert (entropy is not None) == with_entropy
        grads.append(torch.autograd.grad((logprobs * case.g_logprobs).sum(), logits)[0])
    assert torch.equal(*grads)


def test_entropy_alone_has_a_gradient() -> None:
    """An entropy bonus may be the only term of a loss."""
    case = dataclasses.replace(make_case(), g_logprobs=torch.zeros(6))
    logits = case.logits.clone().requires_grad_()
    _, entropy = token_logprobs(logits, case.targets, **case.arguments, with_entropy=True)
    (grad,) = torch.autograd.grad((entropy * case.g_entropy).sum(), logits)
    assert relative_error(grad, case.oracle()[2]) < GRAD_TOLERANCE[torch.float32]


def test_expanded_cotangents_are_read_right() -> None:
    """`.sum().backward()` hands over a stride-0 tensor."""
    logits = torch.randn(5, 40, requires_grad=True)
    token_logprobs(logits, torch.arange(5))[0].sum().backward()
    grad, logits.grad = logits.grad, None
    torch.log_softmax(logits, 1)[torch.arange(5), torch.arange(5)].sum().backward()
    torch.testing.assert_close(grad, logits.grad)


def test_permuted_rows_give_permuted_results() -> None:
    """Packing order must not change a bit of a token's logprob or gradient, wherever its logits lie."""
    case = make_case(tokens=64, cols=1001, all_rows=True)
    order = torch.randperm(64)
    moved = {
        name: getattr(case, name)[order] for name in ("logits", "targets", "temperature", "g_logprobs", "g_entropy")
    }
    for got, expected in zip(run(dataclasses.replace(case, **moved)), run(case), strict=True):
        assert torch.equal(got, expected[order])
    # And through rows, which name the same entries in another order.
    case = make_case(tokens=64, cols=1001)
    order = torch.randperm(len(case.rows))
    moved = {name: getattr(case, name)[order] for name in ("rows", "targets", "temperature", "g_logprobs", "g_entropy")}
    logprobs, entropy, grad = run(dataclasses.replace(case, **moved))
    expected_logprobs, expected_entropy, expected_grad = run(case)
    assert torch.equal(logprobs, expected_logprobs[order]) and torch.equal(entropy, expected_entropy[order])
    assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_token_ids_may_lie_beyond_32_bits(with_entropy: bool) -> None:
    """Ids are int64; cut to 32 bits, a target far out would be taken for the owner's of another shard."""
    case = make_case(cols=300, padding=3)
    start = 2**32 + 5
    results = []
    for vocab_start in (0, start):
        logits = case.logits.clone().requires_grad_()
        options = case.arguments | {"vocab_start": vocab_start, "with_entropy": with_entropy}
        logprobs, entropy = token_logprobs(logits, case.targets + vocab_start, **options)
        loss = case.loss(logprobs, entropy if with_entropy else torch.zeros(()))
        results.append((logprobs.detach(), *torch.autograd.grad(loss, logits)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_compiled_graph_equals_eager(compiled: None, with_entropy: bool, dtype: torch.dtype) -> None:
    """The op must not break a compiled loss into pieces, and its gradient must be the same to the bit."""
    case = make_case(dtype=dtype)

    def score(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return token_logprobs(logits, case.targets, **case.arguments, with_entropy=with_entropy)

    results = []
    torch.compiler.reset()
    for call in (score, torch.compile(score, fullgraph=True, backend="aot_eager")):
        logits = case.logits.clone().requires_grad_()
        logprobs, entropy = call(logits)
        assert (entropy is None) != with_entropy
        entropy = torch.zeros(()) if entropy is None else entropy
        (grad,) = torch.autograd.grad(case.loss(logprobs, entropy), logits)
        results.append((logprobs.detach(), entropy.detach(), grad))
    assert all(torch.equal(got, expected) for got, expected in zip(*results, strict=True))
