"""How tests of other trainers' names read a configuration."""

from __future__ import annotations

import pytest

from mgrpo.config import ConfigError
from mgrpo.config.fields import flat
from mgrpo.moving import from_values


def changed(config):
    """Settings that differ from the defaults."""
    default = flat(from_values({}))
    return {name: value for name, value in flat(config).items() if value != default[name]}


def problems_of(values, **options):
    with pytest.raises(ConfigError) as caught:
        from_values(values, **options)
    return caught.value.problems


def assert_means(given, expected):
    """These settings and no others differ from the defaults."""
    default = flat(from_values({}))
    assert changed(from_values(given)) == {name: value for name, value in expected.items() if default[name] != value}
