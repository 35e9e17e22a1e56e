"""The program `docker` of the tests: that of a daemon, where one can be started, or a stand-in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.namespaces import skip_without_namespaces
from tests.unit.environments.boxes import fake_docker
from tests.unit.environments.boxes.contained import IMAGE
from tests.unit.environments.boxes.docker_daemon import daemon, docker, make_image


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that has the image."""
    with daemon(tmp_path_factory.mktemp("docker")) as address:
        make_image(address, IMAGE, fake_docker.WORKDIR)
        yield address


@pytest.fixture
def real(address, monkeypatch, tmp_path) -> None:
    """The program `docker` asks the daemon."""
    monkeypatch.setenv("DOCKER_HOST", address)
    _own_temporary(monkeypatch, tmp_path)
    yield
    assert docker("ps", "--all", "--quiet") == "", "no container may stay"


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Path:
    """The stand-in is the program `docker`; its folder, in which it records its calls."""
    skip_without_namespaces()
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_docker.__file__} "$@"\n')
    program.chmod(0o755)
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(state))
    _own_temporary(monkeypatch, tmp_path)
    return state


@pytest.fixture(params=["real", "stand_in"])
def either(request: pytest.FixtureRequest) -> str:
    """Which of the two the program `docker` is."""
    request.getfixturevalue(request.param)
    return request.param


def _own_temporary(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "temporary"))
