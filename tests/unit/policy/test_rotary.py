"""Turning queries and keys by their positions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mgrpo.models.rope import Rope
from mgrpo.parallel import backend

TOKENS, HEAD_DIM = 7, 16
POSITIONS = torch.tensor([0, 1, 2, 1, 2, 40000, 3])


@pytest.fixture(scope="module")
def rotary():
    backend.install()
    from mgrpo.policy.layers import rotary

    return rotary


def operands(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Query and key as Megatron splits them: views of one projection."""
    random = torch.Generator().manual_seed(0)
    mixed = torch.randn(TOKENS, 1, 6, HEAD_DIM, generator=random).to(device, dtype).requires_grad_()
    return [mixed[:, :, :4], mixed[:, :, 4:]]


def with_gradients(results: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.arange(HEAD_DIM, device=results[0].device)
    weighted = torch.stack([(result * weights).sum() for result in results]).sum()
    return [*results, *torch.autograd.grad(weighted, leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turns_equal_megatrons_to_the_last_bit(rotary, dtype: torch.dtype) -> None:
    """A model would train with other positions than those its engine, which takes the same formula, samples with."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    kinds = torch.stack([rotary.frequencies(Rope(theta=theta), HEAD_DIM) for theta in (1e4, 1e6)])
    packed = rotary.PackedRotary(kinds, [1.0] * len(kinds), dtype)
    table = packed(packed.get_rotary_seq_len(None, SimpleNamespace(positions=POSITIONS)))
    leaves = operands(dtype, "cpu")
    for kind, frequencies in enumerate(kinds):
        angles = (POSITIONS[:, None] * frequencies).repeat(1, 2)[:, None, None]
        expected = [_apply_rotary_pos_emb_bshd(leaf, angles) for leaf in leaves]
        got = list(rotary.turned(*leaves, *table[kind]))
        assert all(map(torch.equal, with_gradients(got, leaves), with_gradients(expected, leaves)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rank", "size", "held"),
    [(0, 1, [*range(12)]), (0, 2, [0, 1, 6, 7, 8, 11]), (1, 2, [2, 3, 4, 5, 9, 10])],
)
def test_turns_of_a_packs_shares_equal_float64s(
    rotary, dtype: torch.dtype, rank: int, size: int, held: list[int]
) -> None:
    """A token's angle is that of its place in its own sequence, on whichever context rank and in whichever branch it lies."""
    from mgrpo.parallel.packed import packs

    positions = np.array([0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2, 40000])
    branches = np.array([0, 0, 0, 1, 1, 2, 2, 2, 0, 0, 0, 0])
    documents = packs.describe(np.array([0, 8, 12]), positions, branches, rank=rank, size=size)
    packed = rotary.PackedRotary(rotary.frequencies(Rope(theta=1e4), HEAD_DIM)[None], [1.0], dtype)
    table = packed(packed.get_rotary_seq_len(None, documents))[0]
    mixed = torch.randn(12, 1, 6, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = torch.cat(rotary.turned(mixed[held, :, :4], mixed[held, :, 4:], *table), dim=2)
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8)
    pairs = (
        torch.complex(*mixed.double().chunk(2, dim=-1)) * torch.polar(torch.ones(()).double(), angles)[:, None, None]
    )
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)[held]
    # A float32 angle is off by so much of itself, and each factor and product by the model's type.
    rounding = torch.tensor(positions)[held, None, None, None] * 2**-22 + 4 * torch.finfo(dtype).eps
    assert ((got - expected).abs() <= rounding * torch.cat((pairs, pairs), dim=-1)[held].abs()).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; the CPU turns without a compiler")
def test_the_compiled_turn_equals_the_plain_one(rotary) -> None:
    """Both directions of the fused kernel."""
    frequencies = rotary.frequencies(Rope(theta=1e4), HEAD_DIM)[None].cuda()
    table = rotary.PackedRotary(frequencies, [1.0] * len(frequencies), torch.float32)(POSITIONS.cuda())
    leaves = operands(torch.float32, "cuda")
    expected = with_gradients(list(rotary.turned(*leaves, *table[0])), leaves)
    got = with_gradients(list(backend.compiled(rotary.turned)(*leaves, *table[0])), leaves)
    torch.testing.assert_close(got, expected)
