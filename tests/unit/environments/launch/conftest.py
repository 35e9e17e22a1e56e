"""What tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _beside_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands name their files by paths relative to the run's folder."""
    monkeypatch.chdir(Path(__file__).parent)
