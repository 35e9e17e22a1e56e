"""Attention sinks by kernels without them, against the softmax that they are defined by.

On the CPU `varlen_stand_ins` stands for the kernel of variable-length attention: what is proved is that the backward of a
kernel that knows nothing of sinks makes the gradients with them, called with the arguments of torch 2.11 and of torch 2.13.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from mgrpo.parallel import backend
from tests.unit.parallel import varlen_stand_ins
from tests.unit.parallel.test_attention_kernels import (
    BRANCHED,
    HEAD_DIM,
    HEADS,
    LENGTHS,
    compare,
    described,
    operands,
)

PLAIN = [[length] for length in LENGTHS]
MODELS = [{}, {"window": 5}, {"window": 100, "scale": 0.3}]
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> None:
    backend.install()


@pytest.fixture(params=["2.13", "2.11", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the test runs; on the CPU with the functions of a version of torch, 2.11 as `tools/gpu_site.py` completes it."""
    name = "cuda" if request.param == "cuda" else "cpu"
    monkeypatch.setattr(backend, "device", lambda: torch.device(name))
    if request.param == "2.13":
        install(monkeypatch, varlen_stand_ins.forward_2_13)
    if request.param == "2.11":
        install(monkeypatch, varlen_stand_ins.forward_2_11)
        monkeypatch.syspath_prepend(str(TOOLS))
        importlib.import_module("gpu_site").complete(varlen)
    return name


def install(monkeypatch: pytest.MonkeyPatch, forward: Any, backward: Any = varlen_stand_ins.backward) -> None:
    """Put these functions in the place of torch's."""
    monkeypatch.setattr(varlen, "_varlen_attn", forward)
    monkeypatch.setattr(varlen, "_varlen_attn_backward", backward)


def attention(*, window: int | None = None, scale: float | None = None) -> Any:
    from mgrpo.parallel.packed.attention import PackedAttention

    config = SimpleNamespace(kv_channels=HEAD_DIM, params_dtype=torch.float32)
    return PackedAttention(config, sinks=HEADS, window=window, scale=scale)


def leaves_of(documents: list[list[int]], device: str) -> list[torch.Tensor]:
    """Query, key, value, and sinks of about the size of a document's scores."""
    random = torch.Generator().manual_seed(1)
    sinks = (3 * torch.randn(HEADS, generator=random)).bfloat16().float()
    return [*operands(sum(map(sum, documents)), 2, device), sinks.to(device)]


def defined(documents: list[list[int]], *, window: int | None = None, scale: float = HEAD_DIM**-0.5) -> Any:
    """Attention of a document's trunk and branches as the paper of the model writes it: one more logit, which is dropped."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (key, value))
        out, begin = torch.zeros_like(query), 0
        for trunk, *branches in documents:
            seen, starts = [*range(begin, begin + trunk)], begin + trunk
            for own in (
                seen,
                *([*seen, *range(s, s + n)] for s, n in zip(_starts(starts, branches), branches, strict=True)),
            ):
                rows = torch.tensor(own, device=query.device)
                ahead = torch.arange(len(own)) - torch.arange(len(own))[:, None]
                is_seen = ((ahead <= 0) & ((ahead > -window) if window else True)).to(query.device)
                scores = torch.einsum("qhd,khd->hqk", query[rows], key[rows]) * scale
                logits = sinks[:, None, None].expand(-1, len(own), 1)
                shares = torch.cat((scores.masked_fill(~is_seen, -torch.inf), logits), -1).softmax(-1)[..., :-1]
                out = out.index_copy(0, rows, torch.einsum("hqk,khd->qhd", shares, value[rows]))
            begin += trunk + sum(branches)
        return out

    return attend


def _starts(first: int, lengths: list[int]) -> list[int]:
    return [first + sum(lengths[:number]) for number in range(len(lengths))]


def compare_exactly(attend: Any, reference: Any, leaves: list[torch.Tensor], *, has_backward: bool = True) -> None:
    """In float32, the gradients included."""
    results = []
    for call in (attend, reference):
        own = [leaf.clone().requires_grad_(has_backward) for leaf in leaves]
        out = call(*own)
        cotangent = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        results.append([out, *(torch.autograd.grad(out, own, cotangent) if has_backward else ())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("documents", [BRANCHED, PLAIN], ids=["branches", "plain"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_padded_call_has_sinks(documents: list[list[int]], model: dict) -> None:
    """A sink that is off by the scale, or seen by the padding, is another attention; all that a run on CPUs computes."""
    core, pack = attention(**model), described(documents)
    compare_exactly(
        lambda q, k, v, s: core._padded(q, k, v, pack, pack.all_queries, s),
        defined(documents, **model),
        leaves_of(documents, "cpu"),
    )


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_kernel_without_sinks_makes_their_gradients(
    device: str, model: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward knows the softmax by lse alone: with the lse of keys without sink every gradient is wrong, none is missing."""
    core, pack, leaves = attention(**model), described(PLAIN), leaves_of(PLAIN, device)

    monkeypatch.setattr(backend, "flash_attention", lambda dtype, head_dim: "FA2")
    monkeypatch.setattr(core, "_padded", None)

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return core.attend(q, k, v, pack, pack.all_queries, s)

    compare(flash, defined(PLAIN, **model), leaves, has_backward=True)
    if device == "cpu":
        compare_exactly(flash, defined(PLAIN, **model), leaves)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_rank_has_the_sinks_of_its_queries(device: str, rank: int) -> None:
    """Its queries come from two stretches of each document; all their shares go into the same sinks' gradient."""
    core, pack = attention(window=50), described(PLAIN, rank=rank, size=2)
    chosen = torch.from_numpy(pack.local_queries.tokens).to(device)
    whole = defined(PLAIN, window=50)
    compare(
        lambda q, k, v, s: core._flash(q[chosen], k, v, pack, pack.local_queries, s),
        lambda q, k, v, s: whole(q, k, v, s)[chosen],
        leaves_of(PLAIN, device),
        has_backward=True,
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [BRANCHED, PLAIN], ids=["branches", "plain"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_flex_attention_has_sinks(device: str, documents: list[list[int]], model: dict) -> None:
    """Shared prompts on CUDA. FlexAttention has no backward on the CPU."""
    core, pack = attention(**model), described(documents)
    compare(
        lambda q, k, v, s: core._flex(q, k, v, pack.all_queries, s),
        defined(documents, **model),
        leaves_of(documents, device),
        has_backward=device == "cuda",
    )


def test_the_kernels_of_variable_length_attention_take_these_arguments() -> None:
    """They are not public; torch checks types and names, and what comes back must fit."""
    from mgrpo.parallel.packed import varlen as calls
    from mgrpo.parallel.packed.attention_sinks import flash_with_sinks

    assert calls.can_attend(with_lse=True) and calls.can_attend(with_lse=False)
    with FakeTensorMode():
        shapes = ((9, HEADS, 64), (9, 2, 64), (9, 2, 64), (HEADS,))
        leaves = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        cu_seqlens = torch.empty(3, dtype=torch.int32)
        query, key, value, sinks = leaves
        out = flash_with_sinks(query, key, value, sinks, (cu_seqlens, cu_seqlens, 5, 5), scale=0.125, window=4)
        gradients = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert out.shape == shapes[0] and out.dtype == torch.bfloat16
    assert [tuple(gradient.shape) for gradient in gradients] == list(shapes)


STAND_INS = {"2.11": varlen_stand_ins.forward_2_11, "2.13": varlen_stand_ins.forward_2_13}


@pytest.mark.skipif(torch.__version__[:4] not in STAND_INS, reason="there is no stand-in for this version of torch")
def test_the_stand_ins_have_the_signatures_of_torch() -> None:
    """With other names they would prove calls that fail on a GPU."""
    pairs = (
        (STAND_INS[torch.__version__[:4]], varlen._varlen_attn),
        (varlen_stand_ins.backward, varlen._varlen_attn_backward),
    )
    for own, op in pairs:
        assert inspect.signature(own) == inspect.signature(op._init_fn)


def backward_renamed(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, causal, rng_state, scale):
    """A backward of which one argument has another name, and another is gone."""
    raise AssertionError


def forward_with_more(*, philox: torch.Tensor, **operands: Any) -> varlen_stand_ins.Outputs:
    """A forward that requires an argument which no version had."""
    raise AssertionError


@pytest.mark.parametrize(
    ("forward", "backward", "difference"),
    [
        (
            varlen_stand_ins.forward_2_11,
            varlen_stand_ins.backward,
            "_varlen_attn: got an unexpected keyword argument 'enable_gqa'",
        ),
        (
            varlen_stand_ins.forward_2_13,
            backward_renamed,
            "_varlen_attn_backward: missing a required argument: 'causal'",
        ),
        (forward_with_more, varlen_stand_ins.backward, "_varlen_attn: missing a required argument: 'philox'"),
        (None, varlen_stand_ins.backward, "_varlen_attn: None is not a callable object"),
    ],
    ids=["2.11", "renamed", "more", "gone"],
)
def test_a_torch_whose_functions_differ_takes_the_padded_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, forward: Any, backward: Any, difference: str
) -> None:
    """A call that fails in the first step costs the run; one that is silently slower costs more."""
    from mgrpo.parallel.packed import varlen as calls

    calls._take_calls.cache_clear()
    install(monkeypatch, forward, backward)
    monkeypatch.setattr(backend, "flash_attention", lambda dtype, head_dim: "FA2")
    core, pack, leaves = attention(window=5), described(PLAIN), leaves_of(PLAIN, "cpu")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            compare_exactly(
                lambda q, k, v, s: core.attend(q, k, v, pack, pack.all_queries, s), defined(PLAIN, window=5), leaves
            )
    (warning,) = caplog.messages
    assert f"torch {torch.__version__} differs" in warning and difference in warning
