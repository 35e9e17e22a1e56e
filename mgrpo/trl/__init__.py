"""TRL's `GRPOConfig` and `GRPOTrainer` on this project: a script of TRL ports by changing its import.

    from mgrpo.trl import GRPOConfig, GRPOTrainer

Names and defaults are TRL's (preset trl_main). What cannot be done is an error that says so, before anything is started.
"""

from mgrpo.moving.trl_config import GRPOConfig as GRPOConfig
from mgrpo.trl.grpo_trainer import GRPOTrainer as GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
