"""Megatron-core's own GPTModel of a Hugging Face configuration, with none of this project's layers, on one rank and a CPU.

What a Megatron run has in memory and saves: the oracle for the names and places of its checkpoints. The norm alone is ours,
because Megatron-core has one that multiplies by 1 + weight only in Transformer Engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class _OnHost(TorchFunctionMode):
    """Makes on the host what Megatron asks for on a GPU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Inside, Megatron's modules can be built and run without a GPU and without the kernels of its delta nets."""
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.moe import moe_utils

    patches = [
        mock.patch("torch.cuda.current_device", lambda: "cpu"),
        mock.patch.object(get_cuda_rng_tracker(), "fork", lambda *name: contextlib.nullcontext()),
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        mock.patch.object(gated_delta_net, "HAVE_FLA", True),
        mock.patch.object(gated_delta_net, "l2norm", _unit_length, create=True),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(_OnHost())
        yield


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def own_model(hf: dict[str, Any]) -> torch.nn.Module:
    """The model of a config.json, with uninitialised weights in float32; inside `on_host`."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mgrpo.policy.layers.norms import LayerConfig, RMSNorm

    rope = hf["rope_parameters"]
    settings = _of_gpt_oss(hf) if hf["model_type"] == "gpt_oss" else _of_hybrid(hf)
    config = LayerConfig(**_of_all(hf) | settings)
    if rope["rope_type"] == "yarn":
        for name, value in {
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope["beta_fast"],
            "beta_slow": rope["beta_slow"],
            "mscale": None,
            "mscale_all_dim": None,
            "correction_range_round_to_int": rope["truncate"],
        }.items():
            setattr(config, f"yarn_{name}", value)
    layers = [_layer(config, hf, layer) for layer in range(config.num_layers)]
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=-(-hf["vocab_size"] // 128) * 128,
        max_sequence_length=256,
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="yarn" if rope["rope_type"] == "yarn" else "rope",
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        rotary_base=rope["rope_theta"],
    ).eval()


def _of_all(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "ffn_hidden_size": hf.get("intermediate_size", 8),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "gated_linear_unit": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }


def _of_experts(hf: dict[str, Any], count: int, ffn: int) -> dict[str, Any]:
    return {
        "num_moe_experts": count,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": ffn,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "allgather",
    }


def _of_gpt_oss(hf: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return {
        **_of_experts(hf, hf["num_local_experts"], hf["intermediate_size"]),
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "window_size": (hf["sliding_window"] - 1, 0),
        "window_attn_skip_freq": 2,
    }


def _of_hybrid(hf: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "activation_func": F.silu,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in hf["layer_types"]],
        "linear_conv_kernel_dim": hf["linear_conv_kernel_dim"],
        "linear_key_head_dim": hf["linear_key_head_dim"],
        "linear_value_head_dim": hf["linear_value_head_dim"],
        "linear_num_key_heads": hf["linear_num_key_heads"],
        "linear_num_value_heads": hf["linear_num_value_heads"],
        "deterministic_mode": True,
    }
    if "num_experts" in hf:
        settings |= {
            **_of_experts(hf, hf["num_experts"], hf["moe_intermediate_size"]),
            "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
            "moe_layer_freq": [int(_has_experts(hf, layer)) for layer in range(hf["num_hidden_layers"])],
        }
    return settings


def _has_experts(hf: dict[str, Any], layer: int) -> bool:
    return bool(hf.get("num_experts") or hf.get("num_local_experts")) and layer not in hf.get("mlp_only_layers", ())


def _layer(config: Any, hf: dict[str, Any], layer: int) -> Any:
    """Megatron's description of a layer, with its own modules alone except the norms."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mgrpo.policy.layers.norms import RMSNorm

    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
        num_experts=config.num_moe_experts if _has_experts(hf, layer) else None,
    )
    modules = spec.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    if hf["layer_types"][layer] == "linear_attention":
        parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear)
        modules.self_attention = ModuleSpec(GatedDeltaNet, submodules=parts)
        # Transformer Engine's layer has the norm in its first product, where Megatron's specification of hybrids puts it.
        modules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    elif config.qk_layernorm:
        modules.self_attention.submodules.q_layernorm = modules.self_attention.submodules.k_layernorm = RMSNorm
    return spec
