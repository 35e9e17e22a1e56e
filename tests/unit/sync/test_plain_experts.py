"""The experts that take the place of vLLM's packed ones on a CPU."""

from __future__ import annotations

import torch

from mgrpo.sync.vllm_plugin import plain_experts


def test_experts_equal_transformers():
    """An engine with other experts samples from another model than the one that is trained."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=5, experts_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    oracle = MixtralExperts(config)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        tokens = torch.randn(7, 16, generator=generator)
        weights, experts = torch.rand(7, 5, generator=generator).topk(2)
        got = torch.full_like(tokens, 9.0)
        plain_experts(
            got, tokens, oracle.gate_up_proj, oracle.down_proj, None, None, weights, experts.int(), "silu", "vec", False
        )
        torch.testing.assert_close(got, oracle(tokens, experts, weights), rtol=1e-5, atol=1e-4)
