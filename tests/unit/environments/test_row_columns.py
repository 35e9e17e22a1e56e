"""What rows ask of environments, in the forms that Open Instruct takes."""

from __future__ import annotations

import pytest

from mgrpo.environments.offered.row_columns import row_settings


@pytest.mark.parametrize(
    ("config", "settings", "max_calls"),
    [
        (None, {}, None),
        ({"env_name": "counter", "target": 5, "max_steps": 7}, {"counter": {"target": 5}}, 7),
        (
            [{"env_name": "counter", "target": 5}, {"env_name": "search"}],
            {"counter": {"target": 5}, "search": {}},
            None,
        ),
        (
            {"env_configs": [{"env_name": "a", "is_text_env": True, "word": "x"}], "max_steps": 3},
            {"a": {"word": "x"}},
            3,
        ),
        ({"env_configs": None, "env_name": "a", "max_steps": None, "b": None}, {"a": {}}, None),
        ({"max_steps": 9}, {}, 9),
        ([], {}, None),
        ([{"env_name": "a", "max_steps": 2}, {"env_name": "b", "max_steps": 6}], {"a": {}, "b": {}}, 6),
    ],
)
def test_env_config_is_read_in_each_of_its_forms(config, settings, max_calls):
    """Nulls are keys that only other rows have."""
    found = row_settings({"env_config": config})
    assert found.settings == settings and found.max_calls == max_calls


def test_an_absent_column_is_a_null():
    absent = row_settings({"prompt": "p"})
    assert absent == row_settings({"tools": None, "env_config": None, "environment": None})
    assert absent.tools is None and absent.names == frozenset() and absent.environment is None


def test_names_are_those_of_tools_and_settings():
    found = row_settings({"tools": ["a", "b"], "env_config": {"env_name": "c"}, "environment": "d"})
    assert found.names == {"a", "b", "c"} and found.tools == {"a", "b"} and found.environment == "d"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"tools": "python"}, "tools: 'python' is not a list of names"),
        ({"tools": [{"name": "python"}]}, "is not a list of names"),
        ({"env_config": "counter"}, "env_config: 'counter' is neither"),
        ({"env_config": [{"target": 5}]}, "is neither"),
        ({"env_config": {"env_configs": ["counter"]}}, "is neither"),
        ({"env_config": {"env_name": "a", "max_steps": 0}}, "max_steps=0 must be a whole number, at least 1"),
        ({"env_config": {"env_name": "a", "max_steps": "3"}}, "max_steps='3' must be a whole number"),
        ({"env_config": {"env_name": "a", "max_steps": True}}, "max_steps=True must be"),
    ],
)
def test_other_forms_are_refused(row, problem):
    with pytest.raises(ValueError) as raised:
        row_settings(row)
    assert problem in str(raised.value)
