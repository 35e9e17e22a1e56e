"""linear_logprobs against float64: values, both gradients, odd chunks, and the memory it is there to save."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from logprob_cases import relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgrpo.ops import linear_logprobs, reference, token_logprobs
from mgrpo.ops.logprobs import DTYPES

HIDDEN, COLS, PADDING = 24, 203, 5
CHUNKS = [1, 29, 64, 202, 5000]  # 29 divides the valid columns, 202 leaves one alone, 5000 is more than there are

# fp32: the GEMM adds up HIDDEN products in fp32. bf16: a logit near 8 is rounded by up to 2^-6 when it is stored, is then
# divided by a temperature down to 0.5, and several of them meet in a gradient. fp16: an eighth of that.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call of linear_logprobs and the cotangents of its results."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperature: float | Tensor
    valid_cols: int
    g_logprobs: Tensor
    g_entropy: Tensor

    @property
    def arguments(self) -> dict:
        return {"temperature": self.temperature, "valid_cols": self.valid_cols}

    def loss(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return (logprobs * self.g_logprobs).sum() + (entropy * self.g_entropy).sum()

    def oracle(self) -> tuple[Tensor, ...]:
        """Logprobs, entropy and the gradients in hidden and weight, in float64 from the inputs as they are."""
        hidden, weight = self.hidden.double().requires_grad_(), self.weight.double().requires_grad_()
        logits = hidden @ weight[: self.valid_cols].t()
        logprobs, entropy = reference.token_logprobs(logits, self.targets, temperature=self.temperature)
        grads = torch.autograd.grad(self.loss(logprobs, entropy), (hidden, weight))
        return logprobs.detach(), entropy.detach(), *grads


def make_case(*, n: int = 11, cols: int = COLS, padding: int = PADDING, dtype: torch.dtype = torch.float32) -> Case:
    """Logits of standard deviation 2 and one temperature per token; padding rows of the weight hold NaN."""
    weight = torch.randn(cols + padding, HIDDEN) * (2 / HIDDEN**0.5)
    weight[cols:] = torch.nan
    return Case(
        hidden=torch.randn(n, HIDDEN).to(dtype),
        weight=weight.to(dtype),
        targets=torch.randint(0, cols, (n,)),
        temperature=torch.rand(n) + 0.5,
        valid_cols=cols,
        g_logprobs=torch.randn(n),
        g_entropy=torch.randn(n),
    )


def run(case: Case, logits_chunk: int = 64, **options) -> tuple[Tensor, ...]:
    """Logprobs, entropy and the gradients in hidden and weight."""
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    logprobs, entropy = linear_logprobs(
        hidden, weight, case.targets, **case.arguments | options, with_entropy=True, logits_chunk=logits_chunk
    )
    grads = torch.autograd.grad(case.loss(logprobs, entropy), (hidden, weight))
    return logprobs.detach(), entropy.detach(), *grads


def check_against_float64(case: Case, logits_chunk: int = 64) -> None:
    results = run(case, logits_chunk)
    assert [result.dtype for result in results] == [torch.float32] * 2 + [case.hidden.dtype] * 2
    for got, expected in zip(results, case.oracle(), strict=True):
        assert relative_error(got, expected) < TOLERANCE[case.hidden.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits_chunk", CHUNKS)
def test_values_and_gradients_equal_float64(dtype: torch.dtype, logits_chunk: int) -> None:
    """A chunk left out, counted twice or written to another's rows trains the head on another distribution."""
    check_against_float64(make_case(dtype=dtype), logits_chunk)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits_chunk", CHUNKS)
def test_equals_token_logprobs_on_materialised_logits(dtype: torch.dtype, logits_chunk: int) -> None:
    """Chunking saves memory; it must not be another training run."""
    case = make_case(dtype=dtype)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    logits = hidden @ weight[: case.valid_cols].t()
    logprobs, entropy = token_logprobs(logits, case.targets, temperature=case.temperature, with_entropy=True)
    grads = torch.autograd.grad(case.loss(logprobs, entropy), (hidden, weight))
    # bf16: GEMMs of other widths may round a logit the other way; hidden's gradient is rounded once a chunk.
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}[dtype]
    for got, expected in zip(run(case, logits_chunk), (logprobs, entropy, *grads), strict=True):
        assert relative_error(got, expected.detach().double()) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits_chunk", [1, 50, 206])
def test_padding_rows_are_never_read_and_get_no_gradient(dtype: torch.dtype, logits_chunk: int) -> None:
    """Megatron pads the vocabulary; what lies in the padding must not reach a logprob or, times zero, a gradient."""
    poisoned = make_case(dtype=dtype, padding=64)
    case = dataclasses.replace(poisoned, weight=poisoned.weight.nan_to_num(nan=1.0))
    for got, expected in zip(run(poisoned, logits_chunk), run(case, logits_chunk), strict=True):
        assert torch.equal(got, expected)
    assert run(poisoned, logits_chunk)[3][COLS:].count_nonzero() == 0


@pytest.mark.parametrize("temperature", [0.6, 1, 2.5])
def test_one_temperature_for_all_equals_the_same_for_each(temperature: float) -> None:
    """Rollout and trainer must divide by the same temperature, however it is given."""
    one = dataclasses.replace(make_case(), temperature=temperature)
    each = dataclasses.replace(one, temperature=torch.full_like(one.g_logprobs, temperature))
    check_against_float64(one)
    for got, expected in zip(run(one), run(each), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_shifted_vocabulary_is_the_same_vocabulary() -> None:
    """The ids of a shard start at vocab_start and those of a chunk further on: off by one, and all targets are wrong."""
    case = make_case()
    shifted = dataclasses.replace(case, targets=case.targets + 1000)
    for got, expected in zip(run(shifted, vocab_start=1000), run(case), strict=True):
        assert torch.equal(got, expected)


def test_gradient_is_the_derivative_of_the_forward() -> None:
    """Finite differences in float64 know nothing of the formulas, of chunks, or of who needs which gradient."""
    hidden = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)
    targets, temperature = torch.tensor([2, 0, 9, 10]), torch.tensor([1.0, 0.5, 2.0, 0.7], dtype=torch.float64)

    def call(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(
            hidden, weight, targets, temperature=temperature, valid_cols=11, with_entropy=True, logits_chunk=4
        )

    assert torch.autograd.gradcheck(call, (hidden, weight))
    assert torch.autograd.gradcheck(call, (hidden.detach(), weight))
    assert torch.autograd.gradcheck(call, (hidden, weight.detach()))


def test_unused_entropy_does_not_change_the_gradients() -> None:
    """Entropy is often only a metric; asking for it must leave the step as it was."""
    case = make_case()
    found = []
    for with_entropy in (False, True):
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        logprobs, entropy = linear_logprobs(
            hidden, weight, case.targets, **case.arguments, with_entropy=with_entropy, logits_chunk=64
        )
        assert (entropy is not None) == with_entropy
        found.append(torch.autograd.grad((logprobs * case.g_logprobs).sum(), (hidden, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_entropy_alone_has_gradients() -> None:
    """An entropy bonus may be the only term of a loss."""
    case = dataclasses.replace(make_case(), g_logprobs=torch.zeros(11))
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    _, entropy = linear_logprobs(hidden, weight, case.targets, **case.arguments, with_entropy=True, logits_chunk=64)
    grads = torch.autograd.grad((entropy * case.g_entropy).sum(), (hidden, weight))
    for got, expected in zip(grads, case.oracle()[2:], strict=True):
        assert relative_error(got, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1])
def test_no_token_and_one_token_are_legal(n: int, dtype: torch.dtype) -> None:
    """A rank whose micro-batch has no response token still takes part, and its gradient of the weight is zeros."""
    case = make_case(n=n, dtype=dtype)
    check_against_float64(case)
    if n == 0:
        assert run(case)[3].count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_repeat_bitwise_also_on_a_second_backward(dtype: torch.dtype) -> None:
    """Exact resume needs the same numbers from the same inputs; nothing that backward reads may be overwritten by it."""
    case = make_case(n=64, cols=1003, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(run(case), run(case), strict=True))
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    results = linear_logprobs(hidden, weight, case.targets, **case.arguments, with_entropy=True, logits_chunk=100)
    loss = case.loss(*results)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, (hidden, weight)), strict=True))


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that any operation returned, in forward and backward."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_graph_equals_eager(compiled: None, dtype: torch.dtype) -> None:
    """The head must not break a compiled loss into pieces."""
    case = make_case(dtype=dtype)
    eager = run(case, logits_chunk=50)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    call = torch.compile(
        lambda h, w: linear_logprobs(h, w, case.targets, **case.arguments, with_entropy=True, logits_chunk=50),
        fullgraph=True,
        backend="aot_eager",
    )
    logprobs, entropy = call(hidden, weight)
    case.loss(logprobs, entropy).backward()
    for got, expected in zip((logprobs, entropy, hidden.grad, weight.grad), eager, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_logits_never_exist(dtype: torch.dtype) -> None:
    """The memory plan counts on it: one hidden tensor of logits' size, and a large vocabulary is out of memory."""
    n, vocab, chunk = 96, 4096, 256
    logits_bytes = n * vocab * dtype.itemsize
    hidden, targets = torch.randn(n, 8).to(dtype).requires_grad_(), torch.randint(0, vocab, (n,))
    weight = torch.randn(vocab, 8).to(dtype).requires_grad_()
    with LargestTensor() as materialised:
        token_logprobs(hidden @ weight.t(), targets, inplace=True)[0].sum().backward()
    assert materialised.largest >= logits_bytes  # What the fused head would show if it made logits.
    with LargestTensor() as fused:
        logprobs, entropy = linear_logprobs(hidden, weight, targets, with_entropy=True, logits_chunk=chunk)
        (logprobs.sum() + entropy.sum()).backward()
    # The weight's own storage, or a few times a chunk in fp32 where the ops are not compiled.
    assert fused.largest <= max(weight.nbytes, n * chunk * 8) < logits_bytes


X, W, Y = torch.randn(4, 6), torch.randn(10, 6), torch.arange(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": X[None]}, r"hidden is \[1, 4, 6\] torch.float32, expected \[n, hidden\]; flatten"),
        ({"hidden": X.int()}, "hidden is torch.int32, expected one of torch.float32, torch.bfloat16, torch.float16"),
        ({"weight": W.t()}, r"weight is \[6, 10\] torch.float32, expected \[vocab/tp, 6\] torch.float32"),
        ({"weight": W.bfloat16()}, r"weight is \[10, 6\] torch.bfloat16, expected \[vocab/tp, 6\] torch.float32"),
        ({"weight": W.to("meta")}, "weight is on meta, hidden is on cpu"),
        ({"targets": Y[:3]}, r"targets is \[3\] torch.int64, expected \[4\] torch.int64$"),
        ({"targets": Y.int()}, r"targets is \[4\] torch.int32, expected \[4\] torch.int64"),
        ({"targets": Y - 100}, r"targets reach from -100 to -97, expected ids in \[0, 10\); leave ignored tokens out"),
        ({"targets": Y + 5, "valid_cols": 8}, r"targets reach from 5 to 8, expected ids in \[0, 8\)"),
        ({"temperature": 0.0}, "temperature=0.0, expected a finite number > 0"),
        ({"temperature": torch.ones(3)}, r"temperature is \[3\] torch.float32, expected .* shape \[4\]"),
        ({"valid_cols": 11}, r"valid_cols=11 is outside \[0, 10\], the rows of weight"),
        ({"logits_chunk": 0}, "logits_chunk=0, expected at least 1 column; for all columns at once use token_logprobs"),
    ],
)
def test_bad_input_is_refused_with_a_reason(arguments: dict, message: str) -> None:
    """Found here it is a sentence; found later it is a loss that does not fall."""
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**{"hidden": X, "weight": W, "targets": Y, "logits_chunk": 4, **arguments})
