"""Arguments of the public `verify`, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mgrpo.config.schema import Reward


def json_value(ground_truth: object) -> object:
    """The label as a row would hold it; TypeError for a value that a row cannot hold."""
    try:
        return json.loads(json.dumps(ground_truth, default=_plain))
    except TypeError as err:
        raise TypeError(f"ground_truth={ground_truth!r:.80} must be a JSON value: {err}") from None


def reward_settings(values: Mapping[str, object]) -> Reward:
    """The reward section with these values in place of its defaults.

    Raises:
        TypeError: there is no such setting.
        ValueError: a setting cannot have its value.
    """
    if not values:
        return Reward()
    from mgrpo.config.errors import ConfigError
    from mgrpo.config.fields import build, flat, settings
    from mgrpo.config.load import SettingNames, read_values

    for name in values:
        if name not in settings() or settings()[name].section != "reward":
            raise TypeError(f"verify has no setting {name}; those of the reward section are in docs/config.md")
    problems: list[str] = []
    layer, _ = read_values(values, SettingNames(), problems)
    if problems:
        raise ConfigError(problems)
    config = build(layer.values)
    wrong = [
        f"{name}={value} must be {limit}"
        for name, value in flat(config).items()
        if name in values and isinstance(value, (int, float)) and (limit := settings()[name].range)
        if not limit.holds(value)
    ]
    if wrong:
        raise ConfigError(wrong)
    return config.reward


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON value")
