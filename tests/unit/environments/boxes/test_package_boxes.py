"""Boxes of a package, by an entry point of the group `mgrpo.boxes`."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys

import pytest

from mgrpo.environments.boxes.box import Bounds, BoxError
from mgrpo.environments.boxes.opening import check_box, open_box
from mgrpo.environments.launch.command import CommandAgent
from mgrpo.environments.offered.agent import Endpoint
from tests.unit.environments.boxes.boxed import PLENTY_S, SMALL

_MODULE = """
import asyncio
import dataclasses

from mgrpo.environments.boxes.local.local_box import open_local

asked, moved = [], []


class Cloud:
    def __init__(self, inner):
        self._inner, self.folder = inner, inner.folder

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def url_for(self, url):
        moved.append(url)
        return "https://tunnel.example/s/0-1"


async def open_box(bounds):
    asked.append(bounds)
    return Cloud(await open_local(dataclasses.replace(bounds, image=None, cpus=None), walls=["none"]))


async def hangs(bounds):
    await asyncio.sleep(3600)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with two kinds of boxes."""
    (tmp_path / "cloud_boxes.py").write_text(_MODULE)
    facts = tmp_path / "cloud_boxes-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: cloud-boxes\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[mgrpo.boxes]\ncloud = cloud_boxes:open_box\nslow = cloud_boxes:hangs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cloud_boxes", raising=False)
    return importlib.import_module("cloud_boxes")


def test_an_agent_plays_in_a_box_of_a_package(package):
    """It gets the bounds of the settings, a row's image, and the address that its box knows."""
    script = "import json, os; open(os.environ['MGRPO_RESULT'], 'w').write(json.dumps({'reward': 0.5})); print(os.environ['OPENAI_BASE_URL'])"
    agent = CommandAgent(command=f'python -c "{script}"', box="cloud", image="base", memory_mb=256, cpus=0.5)
    endpoint = Endpoint(base_url="http://127.0.0.1:9/s/0-1", api_key="a", reward_key="r")

    async def play():
        try:
            await agent.setup()
            await agent.reset({"image": "own"}, seed=0)
            return await agent.run(endpoint, truth={}, limit_s=PLENTY_S)
        finally:
            await agent.close()

    found = asyncio.run(play())
    assert (found.ended, found.reward, found.output) == ("ended", 0.5, "https://tunnel.example/s/0-1/v1\n")
    assert [(each.image, each.memory_bytes, each.cpus) for each in package.asked] == [
        ("base", 256 * 2**20, 0.5),
        ("own", 256 * 2**20, 0.5),
    ]
    assert package.moved == [endpoint.base_url]


def test_a_package_whose_box_does_not_open_is_not_waited_for(package):
    """A service that hangs would hold every trajectory."""
    with pytest.raises(BoxError, match="agent_box=slow did not open a box within"):
        asyncio.run(check_box("slow", Bounds(start_timeout_s=0.1)))


def test_unknown_kinds_are_named(package):
    """A misspelt word must not become a box without walls."""
    said = (
        "agent_box='lokal' is unknown; expected one of: local, none, docker, podman, or an entry point of the group mgrpo.boxes "
        "(cloud, slow)"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        asyncio.run(open_box("lokal", SMALL))


def test_where_no_package_is_installed_that_is_said():
    with pytest.raises(ValueError, match=re.escape("entry point of the group mgrpo.boxes (none is installed)")):
        asyncio.run(open_box("cloud", SMALL))
