"""Root-mean-square norms (arXiv:1910.07467) wherever models have them; Megatron's own refuses sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from mgrpo.parallel import backend


@dataclass
class LayerConfig(TransformerConfig):
    """Megatron's configuration of a model's layers, and the source of their kernels."""

    uses_liger: bool = False
    """Norms, SwiGLU and rotary embeddings are those of `liger`."""


class RMSNorm(torch.nn.Module):
    """Over the last dimension; multiplies by 1 + weight where `config.layernorm_zero_centered_gamma`."""

    def __init__(self, config: LayerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps, self.is_zero_centred = eps, config.layernorm_zero_centered_gamma
        self.normed = _rms_norm(config)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums gradients over tensor ranks only for parameters that carry this mark.
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` -> same."""
        return self.normed(x, self.weight, self.eps, is_zero_centred=self.is_zero_centred)


def _rms_norm(config: LayerConfig) -> Callable[..., torch.Tensor]:
    if config.uses_liger:
        from mgrpo.policy.layers import liger

        return liger.rms_norm
    # torch's own is one kernel; only its neighbours can be fused.
    return backend.compiled(rms_norm) if config.layernorm_zero_centered_gamma else rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, is_zero_centred: bool) -> torch.Tensor:
    """`[..., hidden]` -> same, times weight, or 1 + weight, `[hidden]`."""
    if not is_zero_centred:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    # 1 + weight would lose the weight's last bits in bf16.
    return F.rms_norm(x.float(), (x.shape[-1],), 1 + weight.float(), eps).to(x.dtype)


class HeadsNorm(torch.nn.Module):
    """Over all heads of a token together; each tensor rank has its own heads and their weights.

    Args:
        heads: number of heads of the whole model, a multiple of the number of tensor ranks.
        hidden_size: size of one head.
    """

    def __init__(self, config: TransformerConfig, heads: int, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.group = parallel_state.get_tensor_model_parallel_group()
        assert heads % self.group.size() == 0, (heads, self.group.size())
        self.eps, self.num_elements = eps, heads * hidden_size
        local_size = self.num_elements // self.group.size()
        self.weight = torch.nn.Parameter(torch.ones(local_size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, 1, heads/tp, head_dim]` -> same. Collective over tensor ranks: 4 bytes per token."""
        squares = backend.compiled(_squares)(x)
        if self.group.size() > 1:
            # All ranks use the sum, so its gradient is a sum over them as well.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        return backend.compiled(_scaled)(x, squares / self.num_elements + self.eps, self.weight.view(x.shape[-2:]))


def _squares(x: torch.Tensor) -> torch.Tensor:
    """`[tokens, 1, heads, dim]` -> float32 `[tokens, 1, 1, 1]`, the sum of squares."""
    return x.float().square().sum((-2, -1), keepdim=True)


def _scaled(x: torch.Tensor, mean_squares: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.rsqrt(mean_squares) * weight.float()).to(x.dtype)


class GatedNorm(torch.nn.Module):
    """Over each head of a delta net, whose tensor ranks have their own heads and one weight in common; then times SiLU of a gate.

    Multiplies by the weight also in models whose other norms multiply by 1 + weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x and gate `[tokens, heads/tp, dim]` -> same. In the backward pass tensor ranks sum the weight's gradient."""
        weight = copy_to_tensor_model_parallel_region(self.weight)
        normed = F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        return (normed * F.silu(gate.float())).to(x.dtype)


class NormThenAdd(torch.nn.Module):
    """Replaces Megatron's sum of a layer's output and its residual: the output is normalised before it is added."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *is_training_and_fused: bool) -> Callable[..., torch.Tensor]:
        """Megatron calls this for the function that adds."""
        return self.add

    def add(self, output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        """Output and residual `[tokens, 1, hidden]` -> same."""
        output, bias = output_with_bias
        assert bias is None and dropout == 0
        # Megatron enables gradients for this sum even where they are disabled for the rest of the model.
        with torch.set_grad_enabled(output.requires_grad):
            return residual + self.norm(output)
