"""The configuration of a run: the settings, the places where their values come from, and whether they can work together."""

from mgrpo.config.dump import to_yaml
from mgrpo.config.errors import ConfigError
from mgrpo.config.loss import LossConfig
from mgrpo.config.schema import Config

__all__ = ["Config", "ConfigError", "LossConfig", "to_yaml"]
