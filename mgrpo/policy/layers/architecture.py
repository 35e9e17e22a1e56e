"""A model's shape and layout in Megatron's terms: its configuration, and the modules each layer is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mgrpo.config.fused_kernels import uses_liger, uses_transformer_engine
from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.megatron_names import router_settings
from mgrpo.models.shape import ModelShape
from mgrpo.parallel import backend
from mgrpo.parallel.moe import dispatcher
from mgrpo.parallel.moe.clamped_experts import ClampedExperts
from mgrpo.parallel.moe.experts import GroupedExperts
from mgrpo.parallel.moe.routers import BiasedRouter
from mgrpo.parallel.packed.attention import PackedAttention
from mgrpo.parallel.packed.context import core_attention
from mgrpo.policy.layers import transformer_engine
from mgrpo.policy.layers.delta_net import GatedDeltaNet
from mgrpo.policy.layers.latent_attention import LatentSelfAttention
from mgrpo.policy.layers.norms import LayerConfig, NormThenAdd, RMSNorm
from mgrpo.policy.layers.rotary import RotaryAttention


def transformer_config(
    shape: ModelShape, layout: Layout, dtype: torch.dtype, settings: Parallel | None = None
) -> LayerConfig:
    """Megatron's description of the model on this layout; `settings` give recomputation, replay, fp8 and kernels."""
    settings = settings or Parallel()
    uses_te = uses_transformer_engine(settings, has_cuda=backend.has_cuda())
    config = LayerConfig(
        **(backend.transformer_settings() | _model_settings(shape)),
        **_axes(layout),
        **_pipeline(layout, shape.num_layers),
        **_recompute_settings(settings),
        fp8=None if settings.fp8 == "none" else settings.fp8,
        fp8_recipe=settings.fp8_recipe,
        tp_comm_overlap=settings.tp_comm_overlap,
        # Where a layer is computed again, its router chooses the same experts.
        moe_enable_routing_replay=bool(shape.experts and (settings.replays_routing or settings.recomputes("moe"))),
        **_dispatcher(settings.moe_token_dispatcher_type),
        moe_permute_fusion=uses_te and shape.experts is not None,
        gradient_accumulation_fusion=backend.accumulates_gradients() and adds_gradients(settings, layout),
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize_without_scaling,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        autocast_dtype=None,
        enable_autocast=False,
        perform_initialization=False,
        uses_liger=uses_liger(settings, has_cuda=backend.has_cuda()),
    )
    if _activation(config, shape) is not None:
        # Megatron's name for an activation that takes gate and up together, from `block`; its constructor knows fewer.
        config.use_te_activation_func, config.bias_activation_fusion = True, False
    # Bias of linear layers outside of attention, and of routers. The constructor excludes it with expert tensor ranks, where Megatron's
    # experts add their bias on each; ours do not.
    config.add_bias_linear = bool(shape.experts and shape.experts.biases)
    return config


def _model_settings(shape: ModelShape) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "layernorm_zero_centered_gamma": shape.zero_centred_norms,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "attention_output_gate": shape.gated_attention,
        # Makes Megatron sum the gradients of these norms over tensor ranks, also without sequence parallelism; the
        # weights of a norm over whole projections are split instead.
        "qk_layernorm": shape.qk_norm == "head",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if shape.activation == "gelu_pytorch_tanh":
        # Megatron's fused kernels do not support this activation.
        settings |= {"activation_func": partial(F.gelu, approximate="tanh"), "bias_activation_fusion": False}
    if shape.experts:
        settings |= {
            "num_moe_experts": shape.experts.count,
            **router_settings(shape.experts),
            "moe_shared_expert_gate": shape.experts.shared_gate,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        }
    return settings


def _activation(config: LayerConfig, shape: ModelShape) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Activation of gate and up in one kernel, where Megatron's is not to be used: on GPUs."""
    if shape.activation == "gelu_pytorch_tanh":
        return backend.compiled(_geglu) if backend.has_cuda() else None
    if config.uses_liger:
        from mgrpo.policy.layers import liger

        return liger.swiglu
    return None


def _geglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`: `[tokens, 1, 2 * ffn]`, gate before up, -> `[tokens, 1, ffn]`."""
    gate, up = gate_and_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def _axes(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        # Packs differ in length; `PackCommunicator` gives the stages each one's.
        "variable_seq_lengths": True,
        # A wait for the device after each message, against a race in old releases of torch.
        "batch_p2p_sync": False,
    }


def _dispatcher(kind: str) -> dict[str, str]:
    if kind == "alltoall":
        return {"moe_token_dispatcher_type": kind}
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": kind}


def _pipeline(layout: Layout, num_layers: int) -> dict[str, Any]:
    """Layers of each chunk of each stage, and settings of sends between stages."""
    if layout.pipeline == 1:
        return {}
    chunks = [["decoder"] * size for size in layout.chunk_sizes(num_layers)]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    settings: dict[str, Any] = {"pipeline_model_parallel_layout": chunks}
    if layout.virtual_pipeline > 1:
        settings |= {
            "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
            # With two stages the previous and the next stage are the same rank: batched messages would be mixed up.
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    return settings


def _recompute_settings(settings: Parallel) -> dict[str, Any]:
    if settings.recompute_granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if settings.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(settings.recompute_modules)}
    return {}


def adds_gradients(settings: Parallel, layout: Layout) -> bool:
    """True if a matrix product may add a weight's gradient to Megatron's buffer itself.

    Megatron-FSDP hands out its gradient buffers itself. Offloaded saved tensors come back as new ones, also weights, which then
    lack a reference to their buffers; under full recomputation no weights are saved.
    """
    saves_weights = settings.activation_offloading and settings.recompute_granularity != "full"
    return layout.sharding < 2 and not saves_weights


def _finalize_without_scaling(
    model: list[DistributedDataParallel], num_tokens: torch.Tensor | None = None, **kwargs: Any
) -> None:
    """Sum gradients over the axes; `num_tokens` is ignored, as the loss is already divided by its global denominator."""
    first: Any = model[0]
    if not first.ddp_config.use_megatron_fsdp:
        # Summed again they would count earlier backward passes once for each rank; Megatron-FSDP sums each pass by itself.
        assert not getattr(first, "has_summed_gradients", False), "two backward passes before an update: zero_gradients"
        first.has_summed_gradients = True
    elif kwargs.get("pg_collection"):
        # First and last stage shard their copies of a tied embedding differently; PolicyOptimizer sums these gradients.
        kwargs["pg_collection"] = copy.copy(kwargs["pg_collection"])
        kwargs["pg_collection"].embd = SimpleNamespace(size=lambda: 1)
    finalize_model_grads(model, None, **kwargs)


def block(
    config: LayerConfig, shape: ModelShape, layers: range, settings: Parallel | None = None
) -> TransformerBlockSubmodules:
    """Megatron's description of the layers of one chunk of a stage."""
    settings = settings or Parallel()
    dispatcher.install()
    attention = core_attention(settings.cp_comm_type)
    specs = [_layer(config, shape, layer, attention) for layer in layers]
    if uses_transformer_engine(settings, has_cuda=backend.has_cuda()):
        for layer, spec in zip(layers, specs, strict=True):
            transformer_engine.use(spec.submodules, shape, layer)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer(config: LayerConfig, shape: ModelShape, layer: int, core: type[PackedAttention]) -> ModuleSpec:
    experts = shape.experts if shape.has_experts(layer) else None
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=experts.count if experts else None)
    modules = spec.submodules
    norms_input, norms_output = shape.norms != "after", shape.norms != "before"
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm if norms_input else IdentityOp
    if norms_output:
        modules.self_attn_bda = modules.mlp_bda = ModuleSpec(NormThenAdd, params={"config": config})
    if shape.delta and not shape.has_attention(layer):
        modules.self_attention = ModuleSpec(GatedDeltaNet, params={"delta": shape.delta})
    else:
        modules.self_attention = _attention(modules.self_attention, config, shape, layer, core)
    mlp = _parts(modules.mlp)
    if experts:
        mlp.experts = _experts(config)
        if experts.clamp is not None:
            mlp.experts = ModuleSpec(ClampedExperts, params={"clamp": experts.clamp})
        if experts.choice_bias:
            mlp.router = BiasedRouter
        mlp = _parts(mlp.shared_experts)
    mlp.activation_func = _activation(config, shape)
    return spec


def _parts(spec: Any) -> Any:
    """The submodules of a description, which megatron-core 0.19 has as a partial in place of a ModuleSpec."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def _experts(config: TransformerConfig) -> type[GroupedExperts]:
    if config.fp8 is None:
        return GroupedExperts
    # It imports Transformer Engine.
    from mgrpo.parallel.moe.eight_bit_experts import EightBitExperts

    return EightBitExperts


def _attention(
    spec: ModuleSpec, config: TransformerConfig, shape: ModelShape, layer: int, core: type[PackedAttention]
) -> ModuleSpec:
    """Attention of one layer; `spec` is Megatron's description of its attention."""
    core_attention = partial(
        core,
        scale=shape.attention_scale,
        window=shape.windows[layer],
        softcap=shape.attention_softcap,
        sinks=shape.heads // config.tensor_model_parallel_size if shape.sinks else 0,
    )
    rope = shape.rope_kinds.index(shape.ropes[layer])
    if shape.latent:
        params = {"rope": rope, "latent": shape.latent, "core_attention": core_attention}
        return ModuleSpec(LatentSelfAttention, params=params)
    spec.module = RotaryAttention
    spec.params.update(rope=rope, has_whole_norms=shape.qk_norm == "whole", has_out_bias=shape.out_bias)
    spec.submodules.core_attention = core_attention
    if shape.qk_norm == "head":
        spec.submodules.q_layernorm = spec.submodules.k_layernorm = RMSNorm
    return spec
