"""Router of an MoE layer with an untrained bias on its choice."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from mgrpo.parallel import backend


class BiasedRouter(TopKRouter):
    """Megatron's router with `expert_bias [experts]` float32, which is added to the scores by which experts are chosen.

    Megatron's own bias moves after every step towards an even load (arXiv:2408.15664), whatever the loss: the policy
    would change without a gradient, the reference and the engines would not follow. Here it stays as it was loaded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron's own constructor has set None, under which name no buffer could be registered.
        del self.expert_bias
        zeros = torch.zeros(self.config.num_moe_experts, dtype=torch.float32, device=backend.device())
        self.register_buffer("expert_bias", zeros)
