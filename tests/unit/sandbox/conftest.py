"""One sandbox for the tests of this folder, where the machine can isolate programs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mgrpo.sandbox.sandbox import Sandbox
from tests.namespaces import skip_without_namespaces

SECRET = "a secret of the service that no program may see"


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    skip_without_namespaces()
    os.environ["MGRPO_TEST_SECRET"] = SECRET
    with Sandbox(memory_mb=512, num_slots=2) as sandbox:
        try:
            sandbox.start()
        finally:
            del os.environ["MGRPO_TEST_SECRET"]
        yield sandbox
