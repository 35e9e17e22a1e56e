"""Where checkpoints lie in these tests: a folder, and a remote store."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["local", "remote"])
def root(request, tmp_path):
    """A root on each kind of storage, by the same contract."""
    if request.param == "local":
        return str(tmp_path / "checkpoints")
    return f"memory://{tmp_path}/checkpoints"
