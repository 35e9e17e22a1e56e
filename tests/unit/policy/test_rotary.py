"""Turning queries and keys by their positions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mgrpo.models.rope import Rope
from mgrpo.parallel import backend

TOKENS, HEAD_DIM = 7, 16
POSITIONS = torch.tensor([0, 1, 2, 1, 2, 40000, 3])


@pytest.fixture(scope="module")
def rotary():
    backend.install()
    from mgrpo.policy import rotary

    return rotary


def operands(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Query and key as Megatron splits them: views of one projection."""
    random = torch.Generator().manual_seed(0)
    mixed = torch.randn(TOKENS, 1, 6, HEAD_DIM, generator=random).to(device, dtype).requires_grad_()
    return [mixed[:, :, :4], mixed[:, :, 4:]]


def with_gradients(results: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    weighted = sum((result * torch.arange(HEAD_DIM, device=result.device)).sum() for result in results)
    return [*results, *torch.autograd.grad(weighted, leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turns_equal_megatrons_to_the_last_bit(rotary, dtype: torch.dtype) -> None:
    """A model would train with other positions than those its engine, which takes the same formula, samples with."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    kinds = torch.stack([rotary.frequencies(Rope(theta=theta), HEAD_DIM) for theta in (1e4, 1e6)])
    packed = rotary.PackedRotary(kinds, dtype)
    table = packed(packed.get_rotary_seq_len(None, SimpleNamespace(positions=POSITIONS)))
    leaves = operands(dtype, "cpu")
    for kind, frequencies in enumerate(kinds):
        angles = (POSITIONS[:, None] * frequencies).repeat(1, 2)[:, None, None]
        expected = [_apply_rotary_pos_emb_bshd(leaf, angles) for leaf in leaves]
        got = list(rotary.turned(*leaves, *table[kind]))
        assert all(map(torch.equal, with_gradients(got, leaves), with_gradients(expected, leaves)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; the CPU turns without a compiler")
def test_the_compiled_turn_equals_the_plain_one(rotary) -> None:
    """Both directions of the fused kernel."""
    frequencies = rotary.frequencies(Rope(theta=1e4), HEAD_DIM)[None].cuda()
    table = rotary.PackedRotary(frequencies, torch.float32)(POSITIONS.cuda())
    leaves = operands(torch.float32, "cuda")
    expected = with_gradients(list(rotary.turned(*leaves, *table[0])), leaves)
    got = with_gradients(list(backend.compiled(rotary.turned)(*leaves, *table[0])), leaves)
    torch.testing.assert_close(got, expected)
