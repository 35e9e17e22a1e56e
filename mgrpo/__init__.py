"""GRPO training of language models on Megatron-core, with rollouts from vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mgrpo.moving.grpo_config import GRPOConfig
    from mgrpo.run.commands.evaluate import evaluate
    from mgrpo.run.start.launch import train
    from mgrpo.run.start.parts import make_learner, start_engines

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "evaluate", "make_learner", "start_engines", "train"]


def __getattr__(name: str) -> Any:
    # Importing the package must stay cheap: verifier workers and vLLM's processes do it too.
    if name == "train":
        from mgrpo.run.start.launch import train

        return train
    if name in ("make_learner", "start_engines"):
        from mgrpo.run.start import parts

        return getattr(parts, name)
    if name == "evaluate":
        from mgrpo.run.commands.evaluate import evaluate

        return evaluate
    if name == "GRPOConfig":
        from mgrpo.moving.grpo_config import GRPOConfig

        return GRPOConfig
    raise AttributeError(f"module 'mgrpo' has no attribute {name!r}")
