"""The CUDA kernels through the Python ops. tests/native compares them with the CPU kernels shape by shape."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from typing import Any

import policy_loss_cases
import pytest
import torch
from kept_cases import GRAD_TOLERANCE, VALUE_TOLERANCE, Problem, make_problem
from logprob_cases import Case, check_distant_rows, make_case, relative_error
from policy_loss_cases import all_settings, check_close, chosen, make_operands, raw_arguments, to
from torch import Tensor

import mgrpo.ops
from mgrpo.ops import KeptSets, LossSettings, linear_logprobs, policy_loss, reference, segment_mean, segment_sums
from mgrpo.ops.logprobs import DTYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not mgrpo.ops.build_info()["cuda_archs"], reason="mgrpo._C was built without CUDA kernels"),
]
LEVELS = ("token", "sequence", "sequence_token")
SETTINGS = {"beta": 0.1, "kl_estimator": 3, "delta": 1.6, "use_rho": True, "by_sequence": True}


def on_own_stream(call: Callable) -> tuple[Tensor, ...]:
    """What call gives when it runs on a stream of its own, on the CPU."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = call()
    stream.synchronize()
    return tuple(x.detach().cpu() for x in results)


def run(case: Case, *, inplace: bool) -> tuple[Tensor, ...]:
    """Logprobs, entropy and gradient, computed on the GPU."""
    moved = {
        field.name: value.cuda() if isinstance(value := getattr(case, field.name), Tensor) else value
        for field in dataclasses.fields(case)
    }
    case = Case(**moved)

    def call() -> tuple[Tensor, ...]:
        leaf = case.logits.clone().requires_grad_()
        logprobs, entropy = mgrpo.ops.token_logprobs(
            leaf * 1, case.targets, **case.arguments, with_entropy=True, inplace=inplace
        )
        return logprobs, entropy, *torch.autograd.grad(case.loss(logprobs, entropy), leaf)

    return on_own_stream(call)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("cols", [1, 1003, 32000, 50001])
@pytest.mark.parametrize(("scale", "offset"), [(4.0, 0.0), (60.0, -500.0), (1e4, 0.0)])
def test_cuda_equals_float64(dtype: torch.dtype, tolerance: float, cols: int, scale: float, offset: float) -> None:
    """The kernels that train are these; and in place, repeated, they must give the same bits."""
    case = make_case(cols=cols, dtype=dtype, scale=scale, offset=offset)
    results = run(case, inplace=False)
    for got, expected, limit in zip(results, case.oracle(), (1e-5, 1e-5, tolerance), strict=True):
        assert relative_error(got, expected) < limit
    for again in (run(case, inplace=False), run(case, inplace=True)):
        for got, expected in zip(again, results, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_beyond_32_bit_offsets(dtype: torch.dtype) -> None:
    """16k tokens of a 152k vocabulary are 2.5e9 logits: a 32-bit row offset would wrap to somebody else's memory."""
    cols, row_stride = 32003, 2**31 + 5
    needed = 2 * (row_stride + cols) * dtype.itemsize
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < needed + 2**30:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")

    def rows() -> Tensor:
        flat = torch.empty(row_stride + cols, dtype=dtype, device="cuda")
        return flat.as_strided((2, cols), (row_stride, 1))

    check_distant_rows(torch.ops.mgrpo, rows)


@pytest.mark.parametrize("ratio_level", LEVELS)
@pytest.mark.parametrize("surrogate", ["ppo_clip", "cispo", "reinforce"])
def test_policy_loss_on_cuda_equals_float64(surrogate: str, ratio_level: str) -> None:
    """One formula serves CPU and CUDA, but who adds up which tokens is the kernel's own."""
    operands = make_operands((5, 0, 37, 255, 1, 8, 256, 257, 2000))  # a block is 256 threads
    exact, on_gpu = to(operands, torch.float64), to(operands, "cuda")
    combinations = [s for kl_estimator in range(4) for s in all_settings(surrogate, ratio_level, kl_estimator)]
    for settings in combinations[::7]:  # 7 has no factor in common with how they repeat
        expected = policy_loss_cases.run(exact, settings)
        check_close(policy_loss_cases.run(on_gpu, settings), expected, settings, sums_tolerance=1e-4)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 1), (1,)])
def test_policy_loss_on_cuda_takes_empty_batches(lengths: tuple[int, ...]) -> None:
    """A grid of no block is an error to CUDA, and a rank without tokens is not one to us."""
    operands = to(make_operands(lengths, smooth=True), "cuda")
    result = policy_loss_cases.run(operands, SETTINGS | {"ratio_level": "sequence"})
    assert result.sums[:, 1].tolist() == [float(length) for length in lengths]
    assert all(torch.isfinite(x).all() for x in (result.loss, result.grad, result.seq_grad))
    sums = segment_sums(operands["logprobs"], operands["weights"], operands["cu_seqlens"])
    assert sums.shape == (2, len(lengths)) and torch.isfinite(sums).all()


@pytest.mark.parametrize("ratio_level", LEVELS)
def test_a_sequence_on_cuda_does_not_depend_on_its_pack_or_on_the_run(ratio_level: str) -> None:
    """Exact resume and packing in any order need the same bits; atomics would give others every time."""
    lengths = (5, 0, 37, 300, 1, 8, *(torch.randperm(300) * 7 % 1500).tolist())
    operands = to(make_operands(lengths), "cuda")
    settings = SETTINGS | {"ratio_level": ratio_level}
    whole = on_own_stream(lambda: policy_loss_cases.run(operands, settings))
    for _ in range(3):
        again = on_own_stream(lambda: policy_loss_cases.run(operands, settings))
        assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
    _, grad, seq_grad, sums = whole
    cuts = list(itertools.pairwise(operands["cu_seqlens"].tolist()))
    for s in (0, 1, 2, 3, 4, 50, 200):
        begin, end = cuts[s]
        alone = {name: x[s : s + 1] if name.startswith("seq_") else x[begin:end] for name, x in operands.items()}
        alone["cu_seqlens"] = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
        result = on_own_stream(lambda alone=alone: policy_loss_cases.run(alone, settings))
        assert torch.equal(result[1], grad[begin:end])
        assert torch.equal(result[2], seq_grad[s : s + 1]) and torch.equal(result[3], sums[s : s + 1])


def test_segments_on_cuda_equal_float64() -> None:
    """A sequence's ratio and its gradient, in which a lost warp is a wrong ratio for long responses only."""
    operands = make_operands((5, 0, 37, 255, 1, 8, 256, 257, 2000))
    x, weights, cu_seqlens = (operands[name] for name in ("logprobs", "weights", "cu_seqlens"))
    g = torch.randn(len(cu_seqlens) - 1)
    results = []
    for device, dtype in (("cuda", torch.float32), ("cuda", torch.float32), ("cpu", torch.float64)):
        leaf = x.to(device, dtype).requires_grad_()
        arguments = leaf, weights.to(device, dtype), cu_seqlens.to(device)
        mean = segment_mean(*arguments)
        (grad,) = torch.autograd.grad(mean, leaf, g.to(device, dtype))
        results.append([y.detach().cpu() for y in (segment_sums(*arguments), mean, grad)])
    for got, again, expected in zip(*results, strict=True):
        assert torch.equal(got, again)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_raw_ops_on_cuda_are_one_kernel_each() -> None:
    """On a few thousand tokens a launch is all that the loss costs; the same in PyTorch is some fifty of them."""
    operands = to(make_operands(), "cuda")
    arguments = [operands[name] for name in ("logprobs", "weights", "cu_seqlens")]
    assert kernels_of(lambda: torch.ops.mgrpo.segment_sums(*arguments)) == ["segment_sums"]
    arguments = raw_arguments(operands, ratio_level=1)
    assert kernels_of(lambda: torch.ops.mgrpo.policy_loss(*arguments)) == ["policy_loss"]


def kernels_of(call: Callable) -> list[str]:
    """What a call runs on the device, copies and fills included; mgrpo's kernels by their short names."""
    call()  # modules load at the first call
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler sees no kernels on this machine")
    return [
        next((short for short in ("policy_loss", "segment_sums") if f"{short}_kernel" in name), name) for name in names
    ]


def test_the_loss_does_not_wait_for_the_device() -> None:
    """A wait in every micro-batch leaves the GPU idle while the host prepares the next launch."""
    operands, settings = chosen(to(make_operands(), "cuda"), SETTINGS | {"ratio_level": "sequence"})
    logprobs = operands["logprobs"].nan_to_num(0.0, 0.0, 0.0).requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        operands["seq_log_ratio"] = segment_mean(logprobs, operands["weights"], operands["cu_seqlens"])
        loss, _ = policy_loss(**operands | {"logprobs": logprobs}, settings=LossSettings(**settings))
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize(
    "name", ["old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "weights", "keep", "cu_seqlens"]
)
def test_operands_on_another_device_are_refused(name: str) -> None:
    """A host pointer read on the device is an illegal access, which ends the process and not the call."""
    operands, settings = chosen(to(make_operands((5,), smooth=True), "cuda"), {})
    with pytest.raises(RuntimeError, match=f"{name} must be on the device of the first argument"):
        policy_loss(**operands | {name: operands[name].cpu()}, settings=LossSettings(**settings))


def test_weights_of_a_sum_on_another_device_are_refused() -> None:
    """The same of the op that a sequence's ratio is made of."""
    operands = to(make_operands((5,), smooth=True), "cuda")
    with pytest.raises(RuntimeError, match="weights must be on the device of the first argument"):
        segment_sums(operands["logprobs"], operands["weights"].cpu(), operands["cu_seqlens"])


# A bf16 logit near 8 is rounded by up to 2^-6 when it is stored, and is then divided by a temperature down to 0.5.
# fp16: an eighth of that.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("logits_chunk", [64, 1000, 4096])
def test_linear_logprobs_on_cuda_equals_float64(dtype: torch.dtype, tolerance: float, logits_chunk: int) -> None:
    """On CUDA the chunks' GEMMs take another path, with fp32 sums of products in half precision; padding holds NaN."""
    n, hidden_size, cols = 37, 64, 2003
    hidden = torch.randn(n, hidden_size).to(dtype)
    weight = torch.randn(cols + 5, hidden_size).mul(2 / hidden_size**0.5).to(dtype)
    weight[cols:] = torch.nan
    targets, temperature = torch.randint(0, cols, (n,)), torch.rand(n) + 0.5
    g_logprobs, g_entropy = torch.randn(2, n).unbind(0)

    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    values = reference.token_logprobs(exact[0] @ exact[1][:cols].t(), targets, temperature=temperature)
    expected = *values, *torch.autograd.grad((values[0] * g_logprobs).sum() + (values[1] * g_entropy).sum(), exact)

    def call() -> tuple[Tensor, ...]:
        leaves = hidden.cuda().requires_grad_(), weight.cuda().requires_grad_()
        logprobs, entropy = linear_logprobs(
            *leaves,
            targets.cuda(),
            temperature=temperature.cuda(),
            valid_cols=cols,
            with_entropy=True,
            logits_chunk=logits_chunk,
        )
        assert entropy is not None
        loss = (logprobs * g_logprobs.cuda()).sum() + (entropy * g_entropy.cuda()).sum()
        return logprobs, entropy, *torch.autograd.grad(loss, leaves)

    got, again = call(), call()
    for result, repeated, want in zip(got, again, expected, strict=True):
        assert torch.equal(result, repeated)
        assert relative_error(result.detach().cpu(), want.detach()) < tolerance
    assert got[3][cols:].count_nonzero() == 0


@pytest.mark.parametrize("head", ["logits", "linear"])
@pytest.mark.parametrize("dtype", list(VALUE_TOLERANCE))
def test_kept_sets_on_cuda_equal_float64(head: str, dtype: torch.dtype) -> None:
    """Sums of a set must not depend on the run: many sets share tokens, whose gradients meet in one row of the weight."""
    sizes = torch.randint(1, 20, (300,))
    sizes[:5] = torch.tensor([1, 32, 33, 500, 2003])
    problem = make_problem(head, n=300, cols=2003, dtype=dtype, sizes=sizes)
    moved = Problem(**{name: on_gpu(getattr(problem, name)) for name in Problem.__dataclass_fields__})
    results, again = on_own_stream(moved.run), on_own_stream(moved.run)
    if head == "logits":
        again = on_own_stream(lambda: moved.run(inplace=True))
    limits = [VALUE_TOLERANCE[dtype]] * 2 + [2 * GRAD_TOLERANCE[dtype]] * len(problem.operands)
    for got, repeated, expected, limit in zip(results, again, problem.oracle(), limits, strict=True):
        assert torch.equal(got, repeated)
        assert relative_error(got, expected) < limit


def on_gpu(value: Any) -> Any:
    if isinstance(value, tuple):
        parts = [on_gpu(part) for part in value]
        return KeptSets(*parts) if isinstance(value, KeptSets) else tuple(parts)
    return value.cuda() if isinstance(value, Tensor) else value


def test_bad_kept_sets_on_cuda_give_minus_infinity_without_a_wait() -> None:
    """The device is not asked whether sets are right; an id from nowhere must not be read from foreign memory."""
    logits = torch.randn(3, 10, device="cuda", requires_grad=True)
    ids = torch.tensor([1, 2, 2**31 - 1, 4, -5, 3], dtype=torch.int32, device="cuda")
    kept = KeptSets(ids, torch.tensor([0, 2, 4, 6], dtype=torch.int32, device="cuda"))
    targets = torch.tensor([7, 4, 3], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprobs, _ = mgrpo.ops.token_logprobs(logits, targets, kept=kept, with_entropy=True)
        logprobs[1:].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logprobs[0] == -torch.inf and logprobs[1:].tolist() == [0.0, 0.0]
    assert logits.grad is not None and logits.grad.count_nonzero() == 0
