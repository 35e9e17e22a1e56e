"""The experts that take the place of vLLM's packed ones on a CPU."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest
import torch

from mgrpo.sync.vllm_plugin.live_weights import check_experts
from mgrpo.sync.vllm_plugin.rebound import plain_experts

Kernel = enum.Enum("Kernel", ["TRITON", "FLASHINFER_TRTLLM"])
"""Of vLLM's `UnquantizedMoeBackend`."""


def model_of(kernel: Kernel | None) -> torch.nn.Module:
    """A layer as vLLM's are: `quant_method` says how it computes."""
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = SimpleNamespace(**({"unquantized_backend": kernel} if kernel else {}))
    return torch.nn.Sequential(layer)


def test_kernels_that_reorder_the_weights_of_experts_are_refused():
    """The digest reads back what was written, so that nothing else would notice the wrong order."""
    check_experts(model_of(Kernel.TRITON), has_experts=True)
    check_experts(model_of(None), has_experts=False)
    for kernel, found in ((Kernel.FLASHINFER_TRTLLM, "FLASHINFER_TRTLLM"), (None, "unknown")):
        with pytest.raises(RuntimeError, match=f"kernels for the experts are {found}; .* CPU or TRITON"):
            check_experts(model_of(kernel), has_experts=True)


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
