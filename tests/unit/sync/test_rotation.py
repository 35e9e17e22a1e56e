"""The rotation that takes the place of vLLM's on a CPU."""

from __future__ import annotations

import pytest
import torch

from mgrpo.sync.vllm_plugin.rebound import rotated

HEADS, DIM, THETA = 4, 64, 100.0


def turned(vectors: torch.Tensor) -> torch.Tensor:
    """`[tokens, heads, DIM]`, neighbours as complex numbers turned by position times frequency."""
    frequencies = THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = torch.arange(len(vectors), dtype=torch.float64)[:, None, None] * frequencies
    pairs = torch.view_as_complex(vectors.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).float()


@pytest.mark.parametrize("is_flat", [False, True], ids=["latent attention", "other attention"])
def test_queries_and_keys_turn_by_their_positions(monkeypatch, is_flat):
    """vLLM's kernel turns those of latent attention, [tokens, heads, dim] and parts of longer rows, by the angles of other tokens."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", rotated)
    generator = torch.Generator().manual_seed(0)
    rows, latent = torch.randn(9, HEADS, 96, generator=generator), torch.randn(9, 576, generator=generator)
    query, key = rows[..., 32:], latent[:, None, 512:]
    expected = turned(query), turned(key)
    if is_flat:
        query, key = query.flatten(1), key.flatten(1)
    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_type": "default", "rope_theta": THETA}
        rope = get_rope(DIM, max_position=32, rope_parameters=parameters, is_neox_style=False, dtype=torch.float32)
    for found, truth in zip(rope.forward_cpu(torch.arange(9), query, key), expected, strict=True):
        torch.testing.assert_close(found.view_as(truth), truth, rtol=0, atol=5e-6)
