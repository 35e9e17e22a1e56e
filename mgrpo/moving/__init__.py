"""Other trainers' words: names of Open Instruct and TRL among the settings, presets, configs and launch scripts of all four, and the doors that take them."""

from mgrpo.moving.config_doors import from_values, load_file, parse
from mgrpo.moving.grpo_config import GRPOConfig

__all__ = ["GRPOConfig", "from_values", "load_file", "parse"]
