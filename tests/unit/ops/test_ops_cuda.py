"""The CUDA kernels through token_logprobs. tests/native compares them with the CPU kernels width by width."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from logprob_cases import Case, make_case, relative_error

import mgrpo.ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not mgrpo.ops.build_info()["cuda_archs"], reason="mgrpo._C was built without CUDA kernels"),
]


def run(case: Case, *, inplace: bool) -> tuple[torch.Tensor, ...]:
    """Logprobs, entropy and gradient, computed on the GPU on a stream of its own."""
    moved = {
        field.name: value.cuda() if isinstance(value := getattr(case, field.name), torch.Tensor) else value
        for field in dataclasses.fields(case)
    }
    case = Case(**moved)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        leaf = case.logits.clone().requires_grad_()
        logprobs, entropy = mgrpo.ops.token_logprobs(
            leaf * 1, case.targets, **case.arguments, with_entropy=True, inplace=inplace
        )
        (grad,) = torch.autograd.grad(case.loss(logprobs, entropy), leaf)
    stream.synchronize()
    return logprobs.detach().cpu(), entropy.detach().cpu(), grad.cpu()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("cols", [1, 1003, 32000, 50001])
@pytest.mark.parametrize(("scale", "offset"), [(4.0, 0.0), (60.0, -500.0)])
def test_cuda_equals_float64(dtype: torch.dtype, tolerance: float, cols: int, scale: float, offset: float) -> None:
    """The kernels that train are these; and in place, repeated, they must give the same bits."""
    case = make_case(cols=cols, dtype=dtype, scale=scale, offset=offset)
    results = run(case, inplace=False)
    for got, expected, limit in zip(results, case.oracle(), (1e-5, 1e-5, tolerance), strict=True):
        assert relative_error(got, expected) < limit
    for again in (run(case, inplace=False), run(case, inplace=True)):
        for got, expected in zip(again, results, strict=True):
            assert torch.equal(got, expected)
