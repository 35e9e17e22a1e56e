"""The configuration of a run: what the settings are, where their values come from, whether they can work together."""

from mgrpo.config.dump import to_yaml
from mgrpo.config.errors import ConfigError
from mgrpo.config.load import from_values, load_file, parse
from mgrpo.config.loss import LossConfig
from mgrpo.config.peers.grpo_config import GRPOConfig
from mgrpo.config.schema import Config

__all__ = ["Config", "ConfigError", "GRPOConfig", "LossConfig", "from_values", "load_file", "parse", "to_yaml"]
