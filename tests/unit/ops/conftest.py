"""Settings that the tests of the ops share."""

from __future__ import annotations

import pytest
import torch

import mgrpo.ops


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def compiled() -> None:
    """For tests of the compiled ops: skips, with the reason, where they were not built."""
    info = mgrpo.ops.build_info()
    if not info["compiled"]:
        pytest.skip(f"the extension is not built: {info['error']}")
