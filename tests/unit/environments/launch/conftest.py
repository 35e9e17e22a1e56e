"""What tests of commands share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _beside_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands name their files by paths relative to the run's folder."""
    monkeypatch.chdir(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Boxes of tests beside this one are elsewhere. A short path, since that of a socket is."""
    tmp_path_factory.getbasetemp()  # Else pytest would begin its own inside a folder that ends with this test.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield
