"""Replacements of vLLM's own functions, each with its reason.

Almost all are for the CPU. There vLLM packs weights into private copies, which can be neither written in place nor compared, and some of its kernels need
packed weights or bfloat16, or deviate from the model.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from mgrpo.models.family.refusals import VLLM_CLAMP
from mgrpo.sync.vllm_plugin import expert_exchange, routed_experts
from mgrpo.sync.vllm_plugin.delta_core import register_delta_core

ABSENT = object()
"""Value for a name that is removed."""
CLAMP, SLOPE = VLLM_CLAMP
"""Constants of the activation "swigluoai", the only ones that vLLM's kernel for a CPU supports."""
LATENT_NORM_EPS = 1e-6
"""Epsilon in the code that DeepSeek, Moonshot and Z.ai publish with their weights, and in transformers."""
IMAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")
"""Modules that transformers' image processors of Qwen import at the top."""


def plain_experts(
    output: torch.Tensor,
    tokens: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    weights: torch.Tensor,
    experts: torch.Tensor,
    activation: str,
) -> None:
    """vLLM's `cpu_fused_moe`, one expert at a time, on weights in the layout of vLLM's loader.

    Args:
        output, tokens: `[tokens, hidden]`.
        gate_up, down: `[experts, 2 * ffn, hidden]`, `[experts, hidden, ffn]`.
        gate_up_bias, down_bias: `[experts, 2 * ffn]`, `[experts, hidden]`.
        weights, experts: `[tokens, top_k]`; below 0: an expert of another worker, which adds its result later.
        activation: with "silu" the rows of gates lie above those of ups, with "swigluoai" they alternate.
    """
    output.zero_()
    for expert in experts[experts >= 0].unique().tolist():
        rows, choices = (experts == expert).nonzero(as_tuple=True)
        both = F.linear(tokens[rows], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        done = F.linear(_activated(both, activation), down[expert], None if down_bias is None else down_bias[expert])
        output.index_add_(0, rows, (done * weights[rows, choices, None]).to(output.dtype))


def plain_apply(
    self: Any,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    expert_map: torch.Tensor | None,
    **kwargs: Any,
) -> None:
    """vLLM's `CPUUnquantizedExperts.apply`, which takes an expert's number for its index on this worker.

    Args:
        expert_map: `[experts]`, the index of each of the model's experts on this worker, or -1; None: the worker has all experts.
    """
    own = topk_ids if expert_map is None else expert_map[topk_ids]
    plain_experts(output, hidden_states, w1, w2, self.w1_bias, self.w2_bias, topk_weights, own, activation.value)


def _activated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    if activation == "swigluoai":
        gate, up = gate_up[..., ::2].clamp(max=CLAMP), gate_up[..., 1::2].clamp(-CLAMP, CLAMP)
        return (up + 1) * gate * torch.sigmoid(SLOPE * gate)
    raise NotImplementedError(f"experts with the activation {activation!r} on a CPU")


def expanded(
    values: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """`expand_batch_to_tokens`: the value of each request for each of its drafted tokens.

    Args:
        values, ends: `[requests]`; the tokens of a request end before `ends`.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.where(values == replace_from, replace_to, values).to(values.dtype).repeat_interleave(counts)


def rotated(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`RotaryEmbedding.forward_cpu`, whose kernel misreads queries `[tokens, heads, dim]` as `[tokens, heads * dim]` of other strides."""
    if query.dim() > 2:
        return self.forward_native(positions, query, key)
    import vllm._custom_ops as ops

    cache = self._match_cos_sin_cache_dtype(query)
    ops.rotary_embedding(positions, query, key, self.head_size, cache, self.is_neox_style)
    return query, key


def load_model_class(self: Any) -> type:
    """`_LazyRegisteredModel.load_model_cls`, also without torchvision, which language models do not need."""
    with _images_missing():
        module = importlib.import_module(self.module_name)
    if latent := sys.modules.get("vllm.model_executor.models.deepseek_v2"):
        _mend_latent_norms(latent.DeepseekV2MLAAttention)
    return getattr(module, self.class_name)


def _mend_latent_norms(attention: Any) -> None:
    """Give the norms of latent vectors the epsilon of the published models instead of `rms_norm_eps`."""
    own = attention.__init__
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        for norm in filter(None, (self.q_a_layernorm if self.q_lora_rank else None, self.kv_a_layernorm)):
            norm.variance_epsilon = LATENT_NORM_EPS

    attention.__init__ = init


@contextmanager
def _images_missing() -> Iterator[None]:
    """Provide empty torchvision modules within the block if torchvision is not installed."""
    if find_spec("torchvision") is not None:
        yield
        return
    from transformers.utils import is_torchvision_available

    # The answer is cached, and must not count an empty library as torchvision.
    assert not is_torchvision_available()
    for name in IMAGES:
        module, (parent, _, leaf) = ModuleType(name), name.rpartition(".")
        module.__path__ = []
        sys.modules[name] = module
        if parent:
            setattr(sys.modules[parent], leaf, module)
    try:
        yield
    finally:
        for name in IMAGES:
            del sys.modules[name]


EVERYWHERE: tuple[tuple[str, str, Any, str], ...] = (
    (
        "vllm.model_executor.models.registry:_LazyRegisteredModel",
        "load_model_cls",
        load_model_class,
        "the module of Qwen3.5's language models imports image processors, and these torchvision; and the norms inside latent "
        "attention have an epsilon of their own, which vLLM does not know",
    ),
)
"""Replacements on all devices, before a model is made."""
CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
REBOUND: tuple[tuple[str, str, Any, str], ...] = (
    *EVERYWHERE,
    # (module or module:class, name, value, why)
    ("vllm._custom_ops", "_supports_onednn", False, "keeps linear weights as live parameters instead of oneDNN copies"),
    (
        "vllm.model_executor.layers.utils",
        "check_cpu_sgl_kernel",
        lambda *args, **kwargs: False,
        "the same for the kernels vLLM prefers for bf16 on AMX machines",
    ),
    (CPU_EXPERTS, "cpu_prepack_moe_weight", lambda weight, isa: weight, "the same for the weights of experts"),
    (
        f"{CPU_EXPERTS}:CPUUnquantizedExperts",
        "_pad_moe_intermediate",
        lambda self, layer: None,
        "the same where an expert's ffn is not a multiple of 32",
    ),
    (
        f"{CPU_EXPERTS}:CPUUnquantizedExperts",
        "apply",
        plain_apply,
        "computes with them, and with a worker's own alone; vLLM's kernel needs them packed, and all of them",
    ),
    (
        "vllm._custom_ops",
        "causal_conv1d_weight_pack",
        ABSENT,
        "keeps the weights of a gated delta net's convolution as they are; packed ones have the same shape, so that a sync would "
        "write others than those that vLLM computes with",
    ),
    (
        "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
        "register_cpu_gdn_attention_ops",
        register_delta_core,
        "computes with them, in any dtype; vLLM's kernels are for bfloat16",
    ),
    (
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
        "forward_cpu",
        rotated,
        "vLLM's kernel turns the queries and keys of latent attention by other angles",
    ),
    (
        "vllm.v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        expanded,
        "vLLM's kernel writes temperatures into a copy, and drafts are judged by what memory held",
    ),
    (
        "vllm.config.vllm:VllmConfig",
        "_verify_aux_output_compatibility",
        lambda self: None,
        "on a CPU vLLM does not return the experts of tokens, `routed_experts` does",
    ),
    (
        expert_exchange.COMMUNICATOR,
        "all_gatherv",
        expert_exchange.all_gatherv,
        "vLLM has no exchange of tokens between the workers of a CPU that hold whole experts and attend to tokens of their own",
    ),
    (expert_exchange.COMMUNICATOR, "reduce_scatterv", expert_exchange.reduce_scatterv, "the same"),
    (routed_experts.RUNNER, "execute_model", routed_experts.execute_model, "the same"),
    (routed_experts.RUNNER, "sample_tokens", routed_experts.sample_tokens, "the same"),
)
"""Replacements on a CPU."""


def rebind(*, on_cpu: bool) -> None:
    """Apply the replacements; may be called several times in a process."""
    for place, name, value, _ in REBOUND if on_cpu else EVERYWHERE:
        owner = resolve_name(place)
        if value is not ABSENT:
            setattr(owner, name, value)
        elif hasattr(owner, name):
            delattr(owner, name)
