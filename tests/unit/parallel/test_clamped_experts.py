"""The experts of gpt-oss as grouped products in bf16, against a loop over the experts in float32."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mgrpo.parallel import backend

HIDDEN, FFN, LIMIT = 64, 40, 0.6
"""More than a quarter of the values are clamped. They are multiples of 1/8, which bf16 holds: none is rounded to the other side."""
TOLERANCE = 2e-2
"""Of a bf16 result, relative to the largest value."""
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
NAMES = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    backend.install()
    monkeypatch.setattr(backend, "device", lambda: torch.device(request.param))
    monkeypatch.setattr(backend, "has_cuda", lambda: request.param == "cuda")
    backend.compiled.cache_clear()
    yield request.param
    backend.compiled.cache_clear()


def make_experts(number: int) -> Any:
    """Experts of one rank in bf16, with random weights and biases, those of the first product multiples of 1/8."""
    from mgrpo.parallel.moe.clamped_experts import ClampedExperts

    config: Any = SimpleNamespace(
        params_dtype=torch.bfloat16,
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=FFN,
        expert_model_parallel_size=1,
        activation_func=F.silu,
        gated_linear_unit=True,
    )
    groups: Any = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    experts = ClampedExperts(number, config, groups, clamp=LIMIT)
    random = torch.Generator().manual_seed(0)
    for name, eighths in zip(NAMES, (1, 4, None, None), strict=True):
        own = experts.get_parameter(name).data
        if eighths:
            own.copy_(torch.randint(-eighths, eighths + 1, own.shape, generator=random) / 8)
        else:
            own.copy_(torch.randn(own.shape, generator=random) * FFN**-0.5)
    return experts


def one_by_one(
    rows: torch.Tensor,
    counts: list[int],
    probs: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    *second: torch.Tensor,
) -> torch.Tensor:
    """Each expert's rows by its own matrices `[inputs, outputs]`; gate and up are alternate columns, as in checkpoints."""
    w2, b2 = second
    own = zip(rows.split(counts), w1.chunk(len(counts)), b1, w2.chunk(len(counts)), b2, strict=True)
    outputs = []
    for x, matrix, bias, out_matrix, out_bias in own:
        both = x @ matrix + bias
        gate, up = both[:, ::2].clamp(max=LIMIT), both[:, 1::2].clamp(-LIMIT, LIMIT)
        outputs.append((up + 1) * gate * (1.702 * gate).sigmoid() @ out_matrix + out_bias)
    return torch.cat(outputs) * probs[:, None]


@pytest.mark.parametrize(
    "counts", [[7, 64, 0, 130], [0, 0, 9, 0], [16, 0, 0, 0, 24], [0, 0]], ids=lambda counts: "-".join(map(str, counts))
)
def test_grouped_experts_equal_each_alone(device: str, counts: list[int]) -> None:
    """A bias of the expert beside, or a gradient that was never written for an expert without rows, trains another model."""
    experts = make_experts(len(counts))
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(-1, 2, (sum(counts), HIDDEN), generator=random).bfloat16().to(device).requires_grad_()
    probs = torch.rand(sum(counts), generator=random).to(device).requires_grad_()
    parameters = [experts.get_parameter(name) for name in NAMES]
    out, no_bias = experts(rows, torch.tensor(counts), probs)
    assert no_bias is None and out.dtype == torch.bfloat16

    wide_rows, wide_probs, *wide = (x.detach().float().requires_grad_() for x in (rows, probs, *parameters))
    expected = one_by_one(wide_rows, counts, wide_probs, *wide)
    cotangent = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
    found = torch.autograd.grad(out, [rows, probs, *parameters], cotangent.to(out.dtype))
    exact = torch.autograd.grad(expected, [wide_rows, wide_probs, *wide], cotangent)

    for name, got, want in zip(("out", "rows", "probs", *NAMES), (out, *found), (expected, *exact), strict=True):
        assert got.shape == want.shape
        largest = want.abs().max() if want.numel() else 0
        assert ((got.float() - want).abs() <= TOLERANCE * largest).all(), name
    idle = [number for number, count in enumerate(counts) if not count]
    for gradient in found[2:]:
        assert not gradient.unflatten(0, (len(counts), -1))[idle].any()
