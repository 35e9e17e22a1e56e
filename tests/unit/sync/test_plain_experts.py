"""The experts that take the place of vLLM's packed ones on a CPU."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest
import torch

from mgrpo.layout import InferLayout
from mgrpo.sync.vllm_plugin.live_weights import check_experts
from mgrpo.sync.vllm_plugin.rebound import plain_apply, plain_experts

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


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_experts_equal_transformers(workers):
    """An engine with other experts samples from another model than the one that is trained. Workers add up what they compute."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=5, experts_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    oracle = MixtralExperts(config)
    layout = InferLayout(tensor=workers, expert_parallel=True)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        tokens = torch.randn(7, 16, generator=generator)
        weights, experts = torch.rand(7, 5, generator=generator).topk(2)
        total = torch.zeros_like(tokens)
        for worker in range(workers):
            own, got = layout.experts(worker, 5), torch.full_like(tokens, 9.0)
            places = torch.full((5,), -1, dtype=torch.int32)
            places[own.start : own.stop] = torch.arange(len(own), dtype=torch.int32)
            plain_apply(
                SimpleNamespace(w1_bias=None, w2_bias=None),
                output=got,
                hidden_states=tokens,
                w1=oracle.gate_up_proj[own.start : own.stop],
                w2=oracle.down_proj[own.start : own.stop],
                topk_weights=weights,
                topk_ids=experts.int(),
                activation=SimpleNamespace(value="silu"),
                expert_map=places if workers > 1 else None,
                global_num_experts=5,
            )
            total += got
        torch.testing.assert_close(total, oracle(tokens, experts, weights), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 8, 128, 385])
def test_vllm_places_experts_where_the_weight_sync_writes_them(count):
    """The place of an expert on a worker is one of vLLM's, which no weight shows."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    for workers in (2, 3, 4, 5):
        layout = InferLayout(tensor=workers, expert_parallel=True)
        for worker in range(workers):
            number, places, _ = determine_expert_map(workers, worker, count)
            own = layout.experts(worker, count)
            assert len(own) == number and own == range(count)[own.start : own.stop]
            assert places.tolist() == [expert - own.start if expert in own else -1 for expert in range(count)]


def test_clamped_experts_with_biases_equal_transformers():
    """gpt-oss: rows of gates and ups alternate, and some of both lie beyond the clamp."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=5, experts_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    oracle = GptOssExperts(config)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        tokens = torch.randn(7, 16, generator=generator)
        weights, experts = torch.rand(7, 5, generator=generator).topk(2)
        got = torch.full_like(tokens, 9.0)
        matrices = (oracle.gate_up_proj.mT, oracle.down_proj.mT, oracle.gate_up_proj_bias, oracle.down_proj_bias)
        plain_experts(got, tokens, *matrices, weights, experts.int(), "swigluoai")
        torch.testing.assert_close(got, oracle(tokens, experts, weights), rtol=1e-5, atol=1e-4)
        with pytest.raises(NotImplementedError, match="activation 'gelu'"):
            plain_experts(got, tokens, *matrices, weights, experts.int(), "gelu")
