"""Root-mean-square norms (arXiv:1910.07467) wherever models have them; Megatron's own refuses sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
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


class RMSNorm(torch.nn.Module):
    """Over the last dimension; multiplies by 1 + weight where `config.layernorm_zero_centered_gamma`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps, self.is_zero_centred = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums gradients over tensor ranks only for parameters that carry this mark.
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` -> same."""
        if not self.is_zero_centred:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # 1 + weight would lose the weight's last bits in bf16.
        return F.rms_norm(x.float(), (x.shape[-1],), 1 + self.weight.float(), self.eps).to(x.dtype)


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
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self.group.size() > 1:
            # All ranks use the sum, so its gradient is a sum over them as well.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        weight = self.weight.float().view(x.shape[-2:])
        return (wide * torch.rsqrt(squares / self.num_elements + self.eps) * weight).to(x.dtype)


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

    def __init__(self, config: TransformerConfig) -> None:
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
