"""Where requirements/gpu.txt is installed, tests ask these packages; elsewhere, what was recorded of them."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_config.record import recorded_engines

RECORDED = Path(__file__).with_name("recorded.json")


def has_gpu_packages() -> bool:
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="session")
def recorded() -> dict[str, Any]:
    """The file."""
    return json.loads(RECORDED.read_text())


@pytest.fixture(scope="session")
def engines(recorded: dict[str, Any]) -> dict[str, Any]:
    """What becomes of each engine, by its name in `cases`."""
    return recorded_engines() if has_gpu_packages() else recorded["engines"]


@pytest.fixture(scope="session")
def gpu_packages() -> None:
    """For tests that no recording can do."""
    if not has_gpu_packages():
        pytest.skip("needs requirements/gpu.txt, and no GPU: make test-gpu-config")
