"""The raw ops: contracts towards torch, agreement with the reference, shards that merge to the whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from logprob_cases import check_distant_rows, make_case, relative_error

import mgrpo.ops
from mgrpo.ops import reference
from mgrpo.ops.logprobs import DTYPES, _TokenLogprobs

ONE = torch.ones(1)


def ops() -> list:
    """The implementations to test: the reference, and the compiled ops where they are built."""
    return [reference, *([torch.ops.mgrpo] if mgrpo.ops.build_info()["compiled"] else [])]


def grad_arguments(dtype: torch.dtype = torch.float32) -> tuple:
    """Arguments of logprob_grad_ behind the logits, with every optional tensor present, and the logits."""
    case = make_case(dtype=dtype)
    inv_temp = 1 / case.temperature
    stats = reference.logprob_stats(case.logits, case.targets, case.rows, 0, case.valid_cols, inv_temp, True)
    inv_rows = torch.full((case.logits.shape[0],), -1, dtype=torch.int32)
    inv_rows[case.rows] = torch.arange(case.rows.shape[0], dtype=torch.int32)
    merged = reference.logprob_merge(stats[None], inv_temp)[2]
    rest = (case.targets, inv_rows, 0, case.valid_cols, inv_temp, merged, case.g_logprobs, case.g_entropy)
    return case.logits, rest


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_accepts_every_op(compiled: None, dtype: torch.dtype) -> None:
    """A wrong schema or fake shows up as a wrong graph under torch.compile, far from its cause."""
    op = torch.ops.mgrpo
    logits, rest = grad_arguments(dtype)
    targets, _, _, valid_cols, inv_temp, merged, _, _ = rest
    rows = torch.randperm(logits.shape[0])[: targets.shape[0]]
    torch.library.opcheck(op.logprob_stats.default, (logits, targets, rows, 0, valid_cols, inv_temp, True))
    torch.library.opcheck(op.logprob_stats.default, (logits[:6], targets, None, 0, valid_cols, ONE, False))
    torch.library.opcheck(op.logprob_merge.default, (merged[None].repeat(3, 1, 1), inv_temp))
    torch.library.opcheck(op.logprob_grad_.default, (logits.clone(), *rest))
    torch.library.opcheck(op.logprob_grad_out.default, (logits, torch.empty_like(logits), *rest))


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_ops_equal_the_reference(compiled: None, dtype: torch.dtype) -> None:
    """A run on a machine without a compiler must be the same run."""
    logits, rest = grad_arguments(dtype)
    targets, _, _, valid_cols, inv_temp, _, _, _ = rest
    rows = torch.randperm(logits.shape[0])[: targets.shape[0]]
    results = {}
    for implementation in ops():
        stats = implementation.logprob_stats(logits, targets, rows, 0, valid_cols, inv_temp, True)
        out = torch.full_like(logits, torch.nan)
        assert implementation.logprob_grad_out(logits, out, *rest) is None
        overwritten = logits.clone()
        assert implementation.logprob_grad_(overwritten, *rest) is None
        assert torch.equal(overwritten, out)
        results[implementation] = (stats, *implementation.logprob_merge(stats[None], inv_temp), out)
    for got, expected in zip(results[torch.ops.mgrpo], results[reference], strict=True):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        limit = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[got.dtype]
        assert relative_error(got, expected.double()) < limit


@pytest.mark.parametrize("cuts", [(0, 334, 668, 1008), (0, 1, 1002, 1008), (0, 1003, 1005, 1008), (0, 0, 500, 1008)])
def test_three_shards_merge_to_the_whole(cuts: tuple[int, ...]) -> None:
    """Tensor parallelism must not change a logprob or a gradient, also when one shard is all padding or empty."""
    case = make_case(cols=1003, padding=5)
    inv_temp = 1 / case.temperature
    inv_rows = torch.full((case.logits.shape[0],), -1, dtype=torch.int32)
    inv_rows[case.rows] = torch.arange(case.rows.shape[0], dtype=torch.int32)
    expected_logprobs, expected_entropy, expected_grad = case.oracle()
    for op in ops():
        shards = [(case.logits[:, a:b], a, max(0, min(b, case.valid_cols) - a)) for a, b in itertools.pairwise(cuts)]
        parts = [op.logprob_stats(x, case.targets, case.rows, a, valid, inv_temp, True) for x, a, valid in shards]
        logprobs, entropy, merged = op.logprob_merge(torch.stack(parts), inv_temp)
        assert relative_error(logprobs, expected_logprobs) < 1e-6
        assert relative_error(entropy, expected_entropy) < 1e-6
        grads = []
        for x, a, valid in shards:
            grads.append(torch.full(x.shape, torch.nan))
            op.logprob_grad_out(
                x, grads[-1], case.targets, inv_rows, a, valid, inv_temp, merged, case.g_logprobs, case.g_entropy
            )
        assert relative_error(torch.cat(grads, 1), expected_grad) < 2e-6


def test_a_target_outside_the_shard_counts_only_in_the_softmax() -> None:
    """The owner of a target adds its logit; every other rank adding something too would shift all logprobs."""
    logits = torch.randn(2, 10)
    for op in ops():
        stats = op.logprob_stats(logits, torch.tensor([3, 25]), None, 20, 10, ONE, False)
        assert stats[3].tolist() == [-torch.inf, logits[1, 5].item()]
        logprobs, _, _ = op.logprob_merge(stats[None], ONE)
        assert logprobs[0] == -torch.inf and torch.isfinite(logprobs[1])


@pytest.mark.parametrize("target", [2**31 + 7, 2**32 + 7, 2**40 + 7])
def test_targets_beyond_32_bits_have_one_owner(target: int) -> None:
    """Cut to 32 bits, 2^32 + 7 is token 7, and two shards would both add a target's logit."""
    logits = torch.randn(1, 10)
    targets = torch.tensor([target])
    for op in ops():
        assert op.logprob_stats(logits, targets, None, target - 7, 10, ONE, False)[3].item() == logits[0, 7].item()
        for start in (0, 2**31, 2**32, 2**40):
            if start != target - 7:
                assert op.logprob_stats(logits, targets, None, start, 10, ONE, False)[3].item() == -torch.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_beyond_32_bit_offsets(compiled: None, tmp_path: Path, dtype: torch.dtype) -> None:
    """16k tokens of a 152k vocabulary are 2.5e9 logits: a 32-bit row offset would wrap to foreign memory."""
    numbers = itertools.count()
    check_distant_rows(torch.ops.mgrpo, lambda: sparse_rows(tmp_path / f"{next(numbers)}", dtype, 1003, 2**31 + 5))


def sparse_rows(path: Path, dtype: torch.dtype, cols: int, row_stride: int) -> torch.Tensor:
    """Two rows, row_stride elements apart, in a file that takes up only the pages written to."""
    numel = row_stride + cols
    try:
        with path.open("wb") as file:
            file.truncate(numel * dtype.itemsize)
        flat = torch.from_file(str(path), shared=True, size=numel, dtype=dtype)
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no sparse file of {numel * dtype.itemsize} bytes can be mapped here: {error}")
    is_sparse = path.stat().st_blocks * 512 < 2**20
    path.unlink()
    if not is_sparse:
        pytest.skip(f"the file system of {path.parent} has no sparse files")
    return flat.as_strided((2, cols), (row_stride, 1))


def test_a_shard_of_padding_only_is_neutral() -> None:
    """The last rank of a small vocabulary may hold nothing but padding."""
    for op in ops():
        stats = op.logprob_stats(torch.full((2, 8), torch.nan), torch.tensor([1, 2]), None, 64, 0, ONE, True)
        assert stats.tolist() == [[-torch.inf] * 2, [0.0] * 2, [0.0] * 2, [-torch.inf] * 2]


def test_reference_gradient_is_the_derivative_of_its_forward() -> None:
    """The oracle's own hand-written backward, checked by finite differences in float64."""
    logits = (torch.randn(5, 13, dtype=torch.float64) * 2).requires_grad_()
    targets, rows = torch.tensor([2, 0, 9]), torch.tensor([4, 0, 3])
    inv_temp = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _TokenLogprobs.apply(x, targets, None, rows, inv_temp, 0, 11, None, True, False)[:2]

    assert torch.autograd.gradcheck(call, (logits,))


def test_raw_ops_refuse_what_would_read_foreign_memory(compiled: None) -> None:
    """No caller should pass wrong shapes, but it must not end in a crash or in garbage."""
    op = torch.ops.mgrpo
    x, y = torch.randn(3, 8), torch.tensor([1, 2, 3])
    stats = op.logprob_stats(x, y, None, 0, 8, ONE, False)
    g = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"valid_cols=9 is outside \[0, 8\]"):
        op.logprob_stats(x, y, None, 0, 9, ONE, False)
    with pytest.raises(RuntimeError, match="targets must have 3 elements, got 2"):
        op.logprob_stats(x, y[:2], None, 0, 8, ONE, False)
    with pytest.raises(RuntimeError, match="targets has the wrong dtype"):
        op.logprob_stats(x, y.int(), None, 0, 8, ONE, False)
    with pytest.raises(RuntimeError, match=r"rows\[1\]=7 is outside \[0, 3\)"):
        op.logprob_stats(x, y, torch.tensor([0, 7, 1]), 0, 8, ONE, False)
    with pytest.raises(RuntimeError, match="unit column stride"):
        op.logprob_stats(torch.randn(8, 3).t(), y, None, 0, 8, ONE, False)
    with pytest.raises(RuntimeError, match="inv_temp must have 1 or 3 elements, got 2"):
        op.logprob_stats(x, y, None, 0, 8, torch.ones(2), False)
    with pytest.raises(RuntimeError, match=r"stats must be \[parts, 4, n\]"):
        op.logprob_merge(stats, ONE)
    with pytest.raises(RuntimeError, match="out must have the dtype, device and shape of logits"):
        op.logprob_grad_out(x, torch.empty(3, 9), y, None, 0, 8, ONE, stats, g, None)
    with pytest.raises(RuntimeError, match="overlapping rows"):
        op.logprob_grad_(torch.randn(8).expand(3, 8), y, None, 0, 8, ONE, stats, g, None)
    with pytest.raises(RuntimeError, match=r"inv_rows\[0\]=3 is outside \[-1, 3\)"):
        op.logprob_grad_(x, y, torch.tensor([3, 1, 2], dtype=torch.int32), 0, 8, ONE, stats, g, None)
