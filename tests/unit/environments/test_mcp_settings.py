"""Settings, bodies and processes of the MCP adaptor that do not need its library."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile

import pytest

from mgrpo.environments.adaptors.mcp import Mcp
from mgrpo.environments.adaptors.mcp_relay import MAX_MESSAGE_BYTES
from mgrpo.environments.adaptors.mcp_session import McpServer, bounded
from mgrpo.environments.offered.agent import masked


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


def passed_on(*code, log=subprocess.DEVNULL):
    """The messages that are passed on of a server that runs this code."""
    relay = [sys.executable, "-m", "mgrpo.environments.adaptors.mcp_relay", sys.executable, "-c", "; ".join(code)]
    return subprocess.run(relay, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, timeout=60).stdout


def test_only_messages_of_a_server_are_passed_on():
    """The library writes a traceback for each other line, as many as a server likes."""
    with tempfile.TemporaryFile() as log:
        assert passed_on("print('Welcome')", "print('{}')", log=log) == b"{}\n"
        log.seek(0)
        assert log.read() == b"Welcome\n"


def test_a_message_that_does_not_end_ends_its_server():
    """A worker that read it would hold it, and delay all other trajectories."""
    with tempfile.TemporaryFile() as log:
        assert passed_on("import sys", "[sys.stdout.write('{' * 2**20) for _ in iter(int, 1)]", log=log) == b""
        log.seek(0)
        assert b"it wrote a message of more than 4194304 bytes and was ended" in log.read()


def test_what_a_server_writes_as_errors_does_not_fill_the_disk():
    with tempfile.TemporaryFile() as log:
        passed_on("import os", "[os.write(2, b'e' * 2**20) for _ in range(40)]", "os.write(2, b'the end')", log=log)
        size = log.seek(0, 2)
        log.seek(0)
        assert size < 2**21 and log.read().endswith(b"the end")


def test_a_process_that_a_server_leaves_ends_with_it():
    """It would go on, with what the server was given, for as long as the worker lives; it holds the pipe here."""
    left = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    pid = int(passed_on("import subprocess, sys", f"left = {left}", "print('{' + str(left.pid))")[1:])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def _pieces(*pieces):
    for piece in pieces:
        yield piece


@pytest.mark.parametrize(
    ("pieces", "by_event", "fits"),
    [
        ([b"a" * MAX_MESSAGE_BYTES], False, True),
        ([b"a" * MAX_MESSAGE_BYTES, b"a"], False, False),
        ([b"a" * MAX_MESSAGE_BYTES, b"\n\n", b"a" * MAX_MESSAGE_BYTES], False, False),
        ([b"a" * MAX_MESSAGE_BYTES, b"a"], True, False),
        ([b"a" * (MAX_MESSAGE_BYTES - 4), b"\r\n\r", b"\n" + b"a" * MAX_MESSAGE_BYTES], True, True),
        ([b"a" * (MAX_MESSAGE_BYTES - 2) + b"\n", b"\n", b"a" * MAX_MESSAGE_BYTES, b"a"], True, False),
    ],
)
def test_a_body_is_bounded_as_a_whole_or_by_its_events(pieces, by_event, fits):
    async def read():
        return [piece async for piece in bounded(_pieces(*pieces), by_event=by_event)]

    if fits:
        assert asyncio.run(read()) == pieces
    else:
        with pytest.raises(ValueError, match="the server sends a message of more than 4194304 bytes"):
            asyncio.run(read())


def test_what_may_be_a_key_of_a_server_is_hidden():
    """A tool that shows its environment or a request would have the model repeat it, and the samples keep it."""
    url = "https://me:password-1@host/mcp?token=query-secret&x=1"
    server = McpServer(
        transport="http", server_url=url, env={"KEY": "env-secret"}, headers={"Authorization": "Bearer head-secret"}
    )
    assert str(server) == "https://host/mcp"
    shown = masked("password-1 query-secret env-secret head-secret and text", server.hidden)
    assert shown == "*** *** *** *** and text"
