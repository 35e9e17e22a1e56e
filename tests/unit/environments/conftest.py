"""How long a frozen worker is waited for in the tests."""

from __future__ import annotations

import pytest

from mgrpo.environments.workers import link


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen worker is given up after the limit of a call."""
    monkeypatch.setattr(link, "PATIENCE_S", 0.3)
