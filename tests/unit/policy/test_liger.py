"""Liger's kernels in a model's layers, on a GPU or, with TRITON_INTERPRET=1, in Triton's interpreter on a CPU (`make test-kernels`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MISSING = [name for name in ("triton", "liger_kernel") if find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; `make test-kernels` has them"),
    pytest.mark.skipif(
        not (IS_INTERPRETED or torch.cuda.is_available()), reason="neither a CUDA device nor TRITON_INTERPRET=1"
    ),
]
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
ROUNDING = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Largest error beside float64, relative to the largest number: one unit in its last place, as the interpreter truncates."""
FAMILIES = {
    "qwen3": ("rms_norm", "swiglu", "turned"),
    "gemma3_text": ("rms_norm", "turned"),
    "olmo3": ("rms_norm", "swiglu", "turned"),
    "glm4_moe": ("rms_norm", "swiglu", "turned"),
    "qwen3_next": ("rms_norm", "swiglu", "turned"),
    "deepseek_v3": ("rms_norm", "swiglu"),
    "gpt_oss": ("rms_norm", "turned"),
}
"""With the kernels that its layers take: GELU, clamped experts and pairs of neighbours are not Liger's."""
LOSS = {"beta": 0.1, "kl_estimator": 2}
Kernels = Any
Call = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    from mgrpo.parallel import backend

    backend.install()
    with pytest.MonkeyPatch.context() as patch:
        if IS_INTERPRETED:
            complete_interpreter(patch)
        from mgrpo.policy.layers import liger

        yield liger


def complete_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Triton 3.7's interpreter leaves floats as Python's, and has no functions of libdevice; Liger's kernels need both."""
    from liger_kernel.ops import rms_norm
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if isinstance(value, float):
            handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(value)

    patch.setattr(interpreter, "_implicit_cvt", converted)
    patch.setattr(rms_norm, "rsqrt", lambda x: tl.math.rsqrt(x))


def compare(fused: Call, plain: Call, leaves: list[torch.Tensor], *constants: Any, **options: Any) -> None:
    """Results and gradients of `fused` are those of `plain` in float64, but for rounding to the leaves' type."""
    found = with_gradients(fused, leaves, *constants, **options)
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in constants]
    exact = with_gradients(plain, [leaf.detach().double().requires_grad_() for leaf in leaves], *wide, **options)
    for got, expected in zip(found, exact, strict=True):
        scale = expected.abs().max()
        assert got.shape == expected.shape and (got.double() - expected).abs().max() <= ROUNDING[got.dtype] * scale


def with_gradients(call: Call, leaves: list[torch.Tensor], *constants: Any, **options: Any) -> list[torch.Tensor]:
    found = call(*leaves, *constants, **options)
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64, device=x.device).view_as(x) for x in results]
    gradients = torch.autograd.grad(results, leaves, [w.to(x.dtype) for w, x in zip(weights, results, strict=True)])
    return [*results, *gradients]


def random(*dims: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dims, generator=generator).to(DEVICE, dtype).requires_grad_()


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("is_zero_centred", [False, True])
@pytest.mark.parametrize("dims", [(5, 1, 48), (3, 1, 4, 16), (1, 1, 64)])
def test_norms_equal_float64s(
    kernels: Kernels, dims: tuple[int, ...], is_zero_centred: bool, dtype: torch.dtype
) -> None:
    """A norm that rounds before its weight, or forgets the 1 of a weight around 0, moves the policy from its engine."""
    from mgrpo.policy.layers.norms import rms_norm

    leaves = [random(*dims, dtype=dtype), random(dims[-1], dtype=dtype, seed=1)]
    compare(kernels.rms_norm, rms_norm, leaves, 1e-5, is_zero_centred=is_zero_centred)


def test_a_norm_leaves_the_gradient_of_its_residual(kernels: Kernels) -> None:
    """A residual gets the same gradient as the norm beside it, which must not be overwritten on the way."""
    from mgrpo.policy.layers.norms import rms_norm

    leaves = [random(6, 1, 32, dtype=torch.float32), random(32, dtype=torch.float32, seed=1)]

    def beside(norm: Call) -> Call:
        return lambda x, weight: x + norm(x, weight, 1e-5, is_zero_centred=False)

    compare(beside(kernels.rms_norm), beside(rms_norm), leaves)


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_swiglu_equals_float64s(kernels: Kernels, dtype: torch.dtype) -> None:
    """Gate and up exchanged, or a gradient with the rows of another token, train another model."""

    def plain(gate_and_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_and_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    if IS_INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies two bfloat16 as integers")
    # It is rounded twice: silu(gate), and the product.
    leaves = [random(7, 1, 40, dtype=dtype)]
    found, exact = (
        with_gradients(kernels.swiglu, leaves),
        with_gradients(plain, [leaves[0].detach().double().requires_grad_()]),
    )
    for got, expected in zip(found, exact, strict=True):
        assert got.shape == expected.shape
        assert (got.double() - expected).abs().max() <= 2 * ROUNDING[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("rotated", [16, 8, 6])
def test_turns_equal_float64s(kernels: Kernels, rotated: int, dtype: torch.dtype) -> None:
    """Heads of which a part is turned keep the rest; a backward pass that turns the same way again is no gradient."""
    from mgrpo.policy.layers.rotary import turned

    mixed = random(9, 1, 6, 16, dtype=dtype)
    angles = torch.randn(9, 1, 1, rotated // 2, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    turns = [angles.cos().to(dtype), angles.sin().to(dtype)]

    def split(turn: Call) -> Call:
        # Views of one projection, as Megatron has them: the kernel must not turn them in place.
        return lambda x, *turns: turn(x[:, :, :4], x[:, :, 4:], *turns)

    before = mixed.detach().clone()
    compare(split(kernels.turned), split(turned), [mixed], *turns)
    assert torch.equal(mixed, before)


@pytest.fixture(scope="module")
def one_rank(kernels: Kernels) -> Iterator[None]:
    from mgrpo.parallel import backend

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=2)
    yield
    backend.leave_process_groups()


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.usefixtures("one_rank")
def test_a_models_gradients_are_those_of_its_plain_layers(
    family: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A norm, activation or rotation that one family has otherwise trains that family wrongly, and no other."""
    from tests.ranks import cases
    from tests.tiny_models import save_tiny

    folder, samples, called = str(save_tiny(tmp_path, family)), cases.random_samples(seed=0), set()

    def observed(name: str, kernel: FunctionType) -> FunctionType:
        def call(*args: Any, **options: Any) -> Any:
            called.add(name)
            return kernel(*args, **options)

        return call  # type: ignore[return-value]

    for name in ("rms_norm", "swiglu", "turned"):
        monkeypatch.setattr(kernels, name, observed(name, getattr(kernels, name)))
    expected = cases.gradients(folder, {}, samples, LOSS, settings={"fused_layers": False})
    assert not called
    found = cases.gradients(folder, {}, samples, LOSS, settings={"fused_layers": True})
    assert called == set(FAMILIES[family])
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for (box, got), (wanted_box, wanted) in zip(found["gradients"], expected["gradients"], strict=True):
        assert box == wanted_box
        assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max(), box
