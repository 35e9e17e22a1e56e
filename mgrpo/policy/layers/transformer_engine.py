"""Layers whose matrix products and norms are Transformer Engine's; attention, experts and all other norms stay ours.

The modules are Megatron's wrappers, which can be imported only where Transformer Engine is: so the imports are inside.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from mgrpo.models.shape import ModelShape


def use(modules: TransformerLayerSubmodules, shape: ModelShape, layer: int) -> None:
    """Replace the linear layers of one layer's description; a norm before a product is computed with it."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TERowParallelLinear,
    )

    first = TEColumnParallelLinear if shape.norms == "after" else TELayerNormColumnParallelLinear
    if shape.latent is None and shape.has_attention(layer):  # Latent attention has two products after one norm.
        attention = modules.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = first, TERowParallelLinear
        modules.input_layernorm = IdentityOp
    if not shape.has_experts(layer):
        mlp = modules.mlp.submodules
        mlp.linear_fc1, mlp.linear_fc2 = first, TERowParallelLinear
        modules.pre_mlp_layernorm = IdentityOp


def finish(model: torch.nn.Module, *, accumulates: bool) -> None:
    """Mark the parameters of Transformer Engine's layers as Megatron's are, for gradient norms and their reduction.

    Args:
        accumulates: each product that makes a weight's gradient adds it to Megatron's gradient buffer. Megatron's setting
            of that name also requires apex's kernel for the LM head, which is not Transformer Engine's.
    """
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TELinear

    for module in model.modules():
        if isinstance(module, (TELinear, TELayerNormColumnParallelLinear)):
            module.fuse_wgrad_accumulation = accumulates
            split_dims = {"weight": 1} if module.parallel_mode == "row" else {"weight": 0, "bias": 0}
            for name, dim in split_dims.items():
                marked: Any = getattr(module, name)
                marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = True, dim, 1
            if isinstance(module, TELayerNormColumnParallelLinear):
                module.layer_norm_weight.sequence_parallel = module.sequence_parallel
