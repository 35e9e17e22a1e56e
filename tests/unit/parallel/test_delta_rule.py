"""The gated delta rule on packs against transformers' functions on each document alone, and against its definition.

On the CPU the definition stands for the kernel of flash-linear-attention: this proves the arguments, and on a GPU the same
test proves the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mgrpo.parallel import backend
from mgrpo.parallel.packed.delta_rule import Chunks, causal_convolution, chunked_delta_rule, gated_delta_rule

LENGTHS = (1, 150, 3, 64, 65, 2, 128, 129)
HEADS, KEY_DIM, VALUE_DIM, CHANNELS, WIDTH = 3, 16, 24, 10, 4
FLA_DIM = 64
"""Of keys and values; flash-linear-attention's kernels are tuned for powers of two."""
Rule = Callable[..., torch.Tensor]
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Device of packs and operands, and the kernels that belong to it."""
    monkeypatch.setattr(backend, "device", lambda: torch.device(request.param))
    monkeypatch.setattr(backend, "has_cuda", lambda: request.param == "cuda")
    find_kernel = backend.delta_rule_kernel
    find_kernel.cache_clear()
    yield request.param
    find_kernel.cache_clear()


def boundaries() -> np.ndarray:
    return np.concatenate(([0], np.cumsum(LENGTHS)))


def chunks_of_pack() -> Chunks:
    return Chunks.of(boundaries(), np.ones(sum(LENGTHS)))


def operands(
    device: str, dtype: torch.dtype = torch.float32, *, key_dim: int = KEY_DIM, value_dim: int = VALUE_DIM
) -> list[torch.Tensor]:
    """Queries, keys, values, decays as strong as a trained model's, and betas."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    query, key = (torch.randn(tokens, HEADS, key_dim) for _ in range(2))
    value, beta = torch.randn(tokens, HEADS, value_dim), torch.rand(tokens, HEADS)
    decay = -F.softplus(torch.randn(tokens, HEADS)) * torch.tensor([0.05, 1.0, 16.0])
    return [x.to(device, dtype).requires_grad_() for x in (query, key, value, decay, beta)]


def by_document(rule: Rule, tensors: list[torch.Tensor]) -> torch.Tensor:
    cuts = pairwise(boundaries().tolist())
    return torch.cat([rule(*(x[start:stop] for x in tensors)) for start, stop in cuts])


def transformers_rule(*tensors: torch.Tensor) -> torch.Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    query, key, value, decay, beta = (x[None] for x in tensors)
    out, _ = torch_chunk_gated_delta_rule.__wrapped__(
        query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True
    )
    return out[0]


def definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One token after the other, as in the paper."""
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    key_dim = key.shape[-1]
    state, outputs = value.new_zeros(*key.shape[1:], value.shape[-1]), []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        forgets = torch.eye(key_dim, dtype=k.dtype, device=k.device) - b[:, None, None] * k[:, :, None] * k[:, None]
        state = g.exp()[:, None, None] * forgets @ state + b[:, None, None] * k[:, :, None] * v[:, None]
        outputs.append((q[:, None] @ state)[:, 0] * key_dim**-0.5)
    return torch.stack(outputs)


def kernel_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """chunk_gated_delta_rule by its documentation: one batch of `[1, tokens, heads, dim]`, and the documents in it."""
    assert use_qk_l2norm_in_kernel and g.dtype == torch.float32
    assert cu_seqlens.dtype == torch.int64 and cu_seqlens.tolist() == boundaries().tolist()
    out = by_document(definition, [x[0].float() for x in (query, key, value, g, beta)])
    return out[None].to(query.dtype), None


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], limit: float) -> None:
    """Each with an error of at most `limit` of the largest value."""
    for got, want in zip(found, expected, strict=True):
        assert (got.cpu() - want.cpu()).abs().max() <= limit * want.abs().max().cpu()


def with_gradients(rule: Rule, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output and the gradients of a weighted sum of it."""
    out = rule(*tensors)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize(
    ("oracle", "dtype", "its_dtype", "limit"),
    [
        (transformers_rule, torch.float32, torch.float32, 2e-5),
        (definition, torch.float64, torch.float64, 1e-12),
        # Also where decays are strong; from differences of sums over a chunk it would be 1.2e-6.
        (definition, torch.float32, torch.float64, 7e-7),
    ],
)
def test_packed_documents_equal_each_alone(
    device: str, oracle: Rule, dtype: torch.dtype, its_dtype: torch.dtype, limit: float
) -> None:
    """A state that passes from a document to the next, or a chunk that holds two, trains on what was never sampled."""
    chunks = chunks_of_pack()
    found = with_gradients(partial(chunked_delta_rule, chunks=chunks), operands(device, dtype))
    expected = with_gradients(lambda *tensors: by_document(oracle, [*tensors]), operands("cpu", its_dtype))
    # On CUDA sums are in another order.
    assert_near(found, expected, limit if device == "cpu" else 3 * limit)


@pytest.mark.parametrize("kind", ["chunked", "fla"])
def test_rules_in_bf16_equal_the_definition(device: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models train by flash-linear-attention where it is installed, and by our own rule elsewhere."""
    if kind == "fla" and device == "cpu":
        monkeypatch.setattr(backend, "delta_rule_kernel", lambda dtype: kernel_by_definition)
    elif kind == "fla" and find_spec("fla") is None:
        pytest.skip("flash-linear-attention (fla-core) is not installed")
    mine = operands(device, torch.bfloat16, key_dim=FLA_DIM, value_dim=FLA_DIM)
    # Logarithms of decays are float32 in the model.
    mine[3] = mine[3].detach().float().requires_grad_()
    exact = [x.detach().double().cpu().requires_grad_() for x in mine]
    rule = gated_delta_rule if kind == "fla" else chunked_delta_rule
    found = with_gradients(partial(rule, chunks=chunks_of_pack()), mine)
    assert [x.dtype for x in found] == [torch.bfloat16] * 4 + [torch.float32, torch.bfloat16]
    expected = with_gradients(lambda *tensors: by_document(definition, [*tensors]), exact)
    assert_near(found, expected, 2e-2)


def test_packed_convolution_equals_each_document_alone(device: str) -> None:
    """The first tokens of a document would see the last ones of the document before."""
    torch.manual_seed(0)
    shapes = ((sum(LENGTHS), CHANNELS), (CHANNELS, WIDTH))
    x, weight = (torch.randn(shape).to(device).requires_grad_() for shape in shapes)

    def convolved(part: torch.Tensor) -> torch.Tensor:
        padded = F.pad(part.T, (WIDTH - 1, 0))
        return F.silu(F.conv1d(padded[None], weight[:, None], groups=CHANNELS))[0].T

    results = []
    for out in (causal_convolution(x, weight, chunks_of_pack().offsets), by_document(convolved, [x])):
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_chunks_of_a_step_lie_together() -> None:
    """Worked by hand: three documents of 2, 1 and 3 chunks: first chunks of the third, first and second, then the others."""
    chunks = Chunks.of(np.array([0, 65, 68, 68 + 129]), np.zeros(197))
    assert chunks.alive == (3, 2, 1)
    firsts = chunks.rows[[0, 64, 65, 68, 68 + 64, 68 + 128]] // 64
    assert firsts.tolist() == [1, 4, 2, 0, 3, 5]
    assert (chunks.rows % 64)[[64, 65, 67, 68]].tolist() == [0, 0, 2, 0]


def test_a_branch_comes_behind_its_trunk() -> None:
    """Worked by hand: a trunk of two tokens with branches of one and two, and a document without branches."""
    chunks = Chunks.of(np.array([0, 5, 7]), np.array([0, 0, 1, 2, 2, 0, 0]))
    assert chunks.cu_seqlens.tolist() == [0, 3, 7, 9]
    assert chunks.copied is not None and chunks.copied.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6]
    assert chunks.firsts is not None and chunks.firsts.tolist() == [0, 1, 2, 5, 6, 7, 8]
