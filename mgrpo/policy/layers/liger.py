"""RMSNorm, SwiGLU and rotary embeddings by the Triton kernels of Liger Kernel (arXiv:2410.10989), in Megatron's shapes.

Importing this module imports `liger_kernel` and Triton: `config.fused_kernels.uses_liger` decides whether a model does.
"""

from __future__ import annotations

import torch
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, is_zero_centred: bool) -> torch.Tensor:
    """`[..., hidden]` -> same; computed in float32 and rounded once, as `norms.rms_norm`."""
    offset = 1.0 if is_zero_centred else 0.0
    # In place it would overwrite the output's gradient, which a residual beside the norm shares.
    return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma", False, None)


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`: `[tokens, 1, 2 * ffn]`, gate before up, -> `[tokens, 1, ffn]`."""
    # Its backward returns a matrix whatever the shape of its input.
    return LigerFusedGateUpSiLUMulFunction.apply(gate_and_up.squeeze(1))[:, None]


def turned(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotation as in `policy.layers.rotary.turned`, in float32 and rounded once: `[tokens, 1, heads, head_dim]` -> same.

    The kernel works in place where its input is contiguous. No Megatron operation that computes queries and keys keeps them.
    """
    cosines, sines = (x.flatten(1)[None].float() for x in (cosines, sines))
    rotated = 2 * cosines.shape[-1]
    # It takes [batch, heads, tokens, dim] and reads [batch, tokens, heads, dim].
    pair = LigerRopeFunction.apply(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), cosines, sines, None, 1, rotated)
    query, key = (x.permute(2, 0, 1, 3) for x in pair)
    return query, key
