"""A run that lacks nothing."""

from __future__ import annotations

import pytest


@pytest.fixture
def model(tmp_path):
    """Settings of a run that lacks nothing."""
    (tmp_path / "config.json").write_text("{}")
    return {"model_name_or_path": str(tmp_path), "dataset_mixer_list": ["a", "1.0"]}
