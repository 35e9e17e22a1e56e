"""One sandbox for the tests of this folder, where the machine can isolate programs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mgrpo.sandbox.sandbox import Sandbox

SECRET = "a secret of the service that no program may see"


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    os.environ["MGRPO_TEST_SECRET"] = SECRET
    with Sandbox(memory_mb=512, num_slots=2) as sandbox:
        try:
            sandbox.start()
        except ValueError as err:
            pytest.skip(str(err))
        finally:
            del os.environ["MGRPO_TEST_SECRET"]
        yield sandbox
