"""The adapter section of the configuration: low-rank adapters (LoRA) in place of training all weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mgrpo.config.annotations import ONE_OR_MORE, OPEN_INSTRUCT, TRL
from mgrpo.models.adapters import LoraShape

ALL_LINEAR = "all-linear"
"""Every linear layer of attention, MLP and experts, as peft calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    use_peft: Annotated[bool, OPEN_INSTRUCT, TRL] = False
    """Train low-rank adapters (LoRA) and leave the model's own weights as they are; see docs/lora.md."""
    lora_r: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT, TRL] = 16
    """Rank of the adapters; in reinforcement learning small ones, even 1, learn as much."""
    lora_alpha: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT, TRL] = 32
    """An adapter adds lora_alpha / lora_r x B A to its matrix."""
    lora_target_modules: Annotated[tuple[str, ...], OPEN_INSTRUCT, TRL] = (ALL_LINEAR,)
    """Matrices with an adapter, by their last names in the checkpoint, such as q_proj gate_proj; all-linear: all of attention,
    MLP and experts, without embeddings, head and routers."""
    use_rslora: Annotated[bool, TRL] = False
    """Divide lora_alpha by the square root of lora_r instead (rank-stabilised LoRA)."""
    lora_adapter_path: str | None = None
    """Folder of an adapter in peft's format to start from, or its name on the Hub; its rank, alpha and modules hold where none are given."""

    @property
    def lora(self) -> LoraShape | None:
        """The adapters of the run; None where all weights are trained."""
        if not self.use_peft:
            return None
        targets = () if ALL_LINEAR in self.lora_target_modules else self.lora_target_modules
        return LoraShape(rank=self.lora_r, alpha=self.lora_alpha, use_rslora=self.use_rslora, targets=targets)
