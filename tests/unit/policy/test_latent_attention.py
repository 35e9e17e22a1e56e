"""A layer of latent attention in bf16 against itself in float32, which takes the padded call.

On the CPU a loop over sequences stands for the kernel of variable-length attention, and FlexAttention runs uncompiled and has
no backward, as in `test_attention_kernels`; on a GPU the same tests prove the kernels and the compiled assembly of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgrpo.models.rope import Rope
from mgrpo.models.shape import LatentAttention
from mgrpo.parallel import backend
from tests.unit.parallel.test_attention_kernels import (
    BRANCHED,
    LENGTHS,
    described,
    one_sequence_after_another,
)

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
HIDDEN, HEADS = 64, 4
# Values are narrower than keys, which have nope_dim + rope_dim dimensions.
QUERY_OF_HIDDEN = LatentAttention(q_rank=None, kv_rank=32, nope_dim=32, rope_dim=16, v_dim=24)
QUERY_OF_LATENT = LatentAttention(q_rank=24, kv_rank=32, nope_dim=32, rope_dim=16, v_dim=24)
TOLERANCE = 2e-2
"""Of a bf16 result, relative to the largest value."""


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Device of the test; on the CPU with a stand-in for the kernel that only CUDA has."""
    backend.install()
    monkeypatch.setattr(backend, "device", lambda: torch.device(request.param))
    monkeypatch.setattr(backend, "has_cuda", lambda: request.param == "cuda")
    if request.param == "cpu":
        monkeypatch.setattr(
            backend, "flash_attention", lambda dtype, head_dim: "FA2" if dtype == torch.bfloat16 else None
        )
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_sequence_after_another)
    backend.compiled.cache_clear()
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=2)
    yield request.param
    backend.leave_process_groups()
    backend.compiled.cache_clear()


def make_layer(latent: LatentAttention, dtype: torch.dtype, device: str) -> Any:
    """The layer of one rank with random weights, which bf16 holds."""
    from mgrpo.parallel.packed.attention import PackedAttention
    from mgrpo.policy.layers.latent_attention import LatentSelfAttention
    from mgrpo.policy.layers.norms import LayerConfig

    config = LayerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        kv_channels=latent.nope_dim + latent.rope_dim,
        add_bias_linear=False,
        params_dtype=dtype,
        perform_initialization=False,
        **backend.transformer_settings(),
    )
    groups: Any = SimpleNamespace(tp=dist.group.WORLD)
    layer = LatentSelfAttention(config, 1, groups, latent=latent, core_attention=partial(PackedAttention), rope=0)
    random = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        noise = torch.randn(parameter.shape, generator=random) * parameter.shape[-1] ** -0.5
        parameter.data = (noise + 1 if "norm" in name else noise).bfloat16().to(device, dtype)
    return layer


def results(
    latent: LatentAttention, dtype: torch.dtype, device: str, pack: Any, *, has_backward: bool
) -> dict[str, Any]:
    """Output, and the gradients of the hidden states and of every weight, by name."""
    from mgrpo.policy.layers.rotary import PackedRotary, frequencies

    layer = make_layer(latent, dtype, device)
    hidden = torch.randn(len(pack.positions), 1, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    hidden = hidden.to(device, dtype).requires_grad_()
    rotary = PackedRotary(frequencies(Rope(theta=1e4), latent.rope_dim)[None].to(device), [1.0], dtype)
    with torch.set_grad_enabled(has_backward):
        out, _ = layer(hidden, None, rotary_pos_emb=rotary(pack.positions), packed_seq_params=pack)
    if not has_backward:
        return {"out": out}
    leaves = {"hidden": hidden, **dict(layer.named_parameters())}
    cotangent = torch.linspace(-1, 1, out.numel(), device=device).view_as(out).to(dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
    return {"out": out, **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("latent", [QUERY_OF_LATENT, QUERY_OF_HIDDEN], ids=["query of a latent", "query of hidden"])
@pytest.mark.parametrize("documents", [[[length] for length in LENGTHS], BRANCHED], ids=["plain", "branches"])
def test_bf16_equals_float32(device: str, latent: LatentAttention, documents: list[list[int]]) -> None:
    """Values that are padded wrongly, or a key whose rotated part is another head's, train another model."""
    pack = described(documents)
    has_backward = device == "cuda" or documents is not BRANCHED
    found, expected = (
        results(latent, dtype, device, pack, has_backward=has_backward) for dtype in (torch.bfloat16, torch.float32)
    )
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert got.dtype == torch.bfloat16 and got.shape == want.shape
        error = (got.float() - want).abs().max() / want.abs().max()
        assert error <= TOLERANCE, (name, error)
