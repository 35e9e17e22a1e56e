"""What learners on GPUs compile of a model's layers: captured whole, once for all lengths, without a change of value."""

from __future__ import annotations

import pytest
import torch

HEADS, DIM = 4, 16


@pytest.fixture(scope="module")
def layers():
    from mgrpo.parallel import backend

    backend.install()
    from mgrpo.parallel.moe import clamped_experts
    from mgrpo.policy.layers import architecture, latent_attention, norms, rotary

    return {
        "zero-centred norm": (lambda x, w: norms.rms_norm(x, w, 1e-5, is_zero_centred=True), [(1, 48), (48,)]),
        "squares of all heads": (norms._squares, [(1, HEADS, DIM)]),
        "norm over all heads": (
            lambda x, s, w: norms._scaled(x, s.square(), w),
            [(1, HEADS, DIM), (1, 1, 1), (HEADS, DIM)],
        ),
        "GeGLU": (architecture._geglu, [(1, 48)]),
        "rotation": (rotary.turned, [(1, HEADS, DIM), (1, 2, DIM), (1, 1, DIM // 2), (1, 1, DIM // 2)]),
        "latent attention's operands": (
            lambda q, kv, k, c, s: latent_attention._assembled(q, kv, k, c, s, DIM),
            [(HEADS, DIM + 8), (HEADS, 2 * DIM), (1, 8), (1, 4), (1, 4)],
        ),
        "clamped SwiGLU": (lambda x: clamped_experts.clamped_swiglu(x, 7.0), [(48,)]),
    }


NAMES = (
    "zero-centred norm",
    "squares of all heads",
    "norm over all heads",
    "GeGLU",
    "rotation",
    "latent attention's operands",
    "clamped SwiGLU",
)
WEIGHTS = {"zero-centred norm": 1, "norm over all heads": 2}
"""The operand that has no tokens."""


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_captured_once_for_all_lengths(layers, name):
    """A graph that breaks is not fused; one that is compiled for each length costs seconds in each step and gives up after eight."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    function, dims = layers[name]
    counter = CompileCounterWithBackend("aot_eager_decomp_partition")
    compiled = torch.compile(function, backend=counter, dynamic=True, fullgraph=True)
    for tokens in (7, 12, 5, 31):
        generator = torch.Generator().manual_seed(tokens)
        operands = [
            torch.randn(shape if WEIGHTS.get(name) == index else (tokens, *shape), generator=generator).requires_grad_()
            for index, shape in enumerate(dims)
        ]
        for got, expected in zip(with_gradients(compiled, operands), with_gradients(function, operands), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def with_gradients(function, operands):
    found = function(*operands)
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    return [*results, *torch.autograd.grad([result.square().sum() for result in results], operands)]
