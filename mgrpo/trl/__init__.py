"""TRL's configs and trainers on this project: a script of TRL ports by changing its imports.

    from mgrpo.trl import GRPOConfig, GRPOTrainer
    from mgrpo.trl import AsyncGRPOConfig, AsyncGRPOTrainer

Names and defaults are TRL's (presets trl_main and trl_async). Unsupported requests are errors before the start, with the reason.
"""

from mgrpo.moving.trl_config import AsyncGRPOConfig as AsyncGRPOConfig
from mgrpo.moving.trl_config import GRPOConfig as GRPOConfig
from mgrpo.trl.grpo_trainer import AsyncGRPOTrainer as AsyncGRPOTrainer
from mgrpo.trl.grpo_trainer import GRPOTrainer as GRPOTrainer

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "GRPOConfig", "GRPOTrainer"]
