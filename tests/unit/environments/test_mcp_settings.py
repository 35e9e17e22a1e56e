"""What the MCP adaptor refuses before it needs its library."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from mgrpo.environments.adaptors.mcp import Mcp


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected a command for stdio, or else a server_url"),
        ({"command": "a", "server_url": "b"}, "expected a command for stdio, or else a server_url"),
        ({"command": "a", "transport": "http"}, "expected a command for stdio, or else a server_url"),
        ({"server_url": "a", "transport": "pigeon"}, "transport='pigeon', expected one of stdio, http, sse"),
        ({"command": "a", "args": "-m b"}, "args='-m b', expected a list of words"),
        ({"command": "a", "session": "call"}, "session='call', expected worker or trajectory"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Mcp(**settings)


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'not installed; install it with: pip install "mcp>=1.24"'):
        asyncio.run(Mcp(command="server").setup())
