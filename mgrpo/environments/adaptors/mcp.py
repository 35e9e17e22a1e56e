"""The tools of an MCP server: a program that is started here (stdio), or one that runs elsewhere (http, sse).

Needs the package `mcp`, versions 1.24 and up or 2. Sessions stay open over calls, see `mcp_session`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from mgrpo.environments.adaptors.mcp_session import TRANSPORTS, McpServer, McpSession, Record, SessionError
from mgrpo.environments.environment import Call, Environment, Observation, Tool
from mgrpo.environments.offered.agent import masked

_MAX_ERROR_CHARS = 1000
_SHARED: dict[tuple[asyncio.AbstractEventLoop, str], tuple[McpSession, int]] = {}
"""Sessions that several instances of a worker use, with the number of their users."""


class Mcp(Environment):
    """Settings: the server, and whether its sessions are shared."""

    name = "mcp"

    def __init__(
        self,
        *,
        server_url: str = "",
        command: str = "",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        transport: str = "",
        tool_name: str = "",
        timeout: float = 60.0,
        session: Literal["worker", "trajectory"] = "worker",
    ) -> None:
        """
        Args:
            server_url: the address of a running server, over http, or over sse if `transport` is that.
            command: starts a server, with `args`, and with `env` beside a few harmless variables of this process.
            tool_name: the only tool to show; default: all.
            session: "worker": one for all trajectories of a worker process, for servers without memory. "trajectory":
                each begins with a new one, and with a new program.
        """
        transport = transport or ("http" if server_url else "stdio")
        if transport not in TRANSPORTS:
            raise ValueError(f"mcp: transport={transport!r}, expected one of {', '.join(TRANSPORTS)}")
        if bool(server_url) == bool(command) or (transport == "stdio") != bool(command):
            raise ValueError(
                f"mcp: got server_url={server_url!r} and command={command!r} with transport={transport!r}, "
                "expected a command for stdio, or else a server_url"
            )
        if isinstance(args, str):
            raise ValueError(f"mcp: args={args!r}, expected a list of words")
        if session not in ("worker", "trajectory"):
            raise ValueError(f"mcp: session={session!r}, expected worker or trajectory")
        self._server = McpServer(
            transport=transport,
            server_url=server_url,
            command=command,
            args=tuple(args),
            env=dict(env or {}),
            headers=dict(headers or {}),
        )
        self._timeout_s, self._is_shared, self._tool_name = timeout, session == "worker", tool_name
        self._session: McpSession | None = None
        self._is_used = False
        self._tools: Sequence[Tool] = ()

    async def setup(self) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise ValueError('mcp: the package is not installed; install it with: pip install "mcp>=1.24"')
        self._session = self._taken() if self._is_shared else McpSession(self._server, timeout_s=self._timeout_s)
        try:
            self._tools = await self._chosen(self._session)
        except BaseException:
            await self.close()
            raise

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> None:
        assert self._session is not None, "setup comes first"
        if self._is_used and not self._is_shared:
            await self._session.renew()
        self._is_used = False

    async def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        self._is_used = True
        return [await self._answered(call) for call in calls]

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and (not self._is_shared or self._is_last()):
            await session.close()

    async def _chosen(self, session: McpSession) -> Sequence[Tool]:
        found = [_tool(record, self._server.hidden) for record in await session.tools()]
        chosen = [tool for tool in found if self._tool_name in ("", tool.name)]
        if not chosen:
            names = ", ".join(tool.name for tool in found) or "none"
            raise ValueError(f"mcp: {self._server} has no tool {self._tool_name!r}; its tools: {names}")
        return chosen

    async def _answered(self, call: Call) -> Observation:
        assert self._session is not None, "setup comes first"
        try:
            result = await self._session.call(call.name, call.arguments)
            text, failed = text_of(result), bool(result.get("isError"))
        except SessionError as err:
            # The command may hold keys, and the server's output is for the user.
            sys.stderr.write(f"mgrpo: {err}\n")
            text, failed = "The tool is not available: its server has ended, or does not answer.", True
        except Exception as err:
            text, failed = f"The call failed: {err!s:.{_MAX_ERROR_CHARS}}", True
        return Observation(text=masked(text, self._server.hidden), failed=failed)

    def _key(self) -> tuple[asyncio.AbstractEventLoop, str]:
        server = self._server
        return asyncio.get_running_loop(), json.dumps([asdict(server), self._timeout_s], sort_keys=True)

    def _taken(self) -> McpSession:
        session, num_users = _SHARED.get(self._key()) or (McpSession(self._server, timeout_s=self._timeout_s), 0)
        _SHARED[self._key()] = session, num_users + 1
        return session

    def _is_last(self) -> bool:
        """Release this user's share of a session; True if it was the last."""
        session, num_users = _SHARED.pop(self._key())
        if num_users > 1:
            _SHARED[self._key()] = session, num_users - 1
        return num_users == 1


def _tool(record: Record, hidden: Sequence[str]) -> Tool:
    schema = record.get("inputSchema") or {"type": "object", "properties": {}}
    return Tool(name=record["name"], description=masked(record.get("description") or "", hidden), parameters=schema)


def text_of(result: Mapping[str, Any]) -> str:
    """The texts of a result; other blocks are named."""
    blocks = result.get("content") or []
    if not blocks and result.get("structuredContent") is not None:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(map(_block, blocks))


def _block(block: Record) -> str:
    held = block.get("resource") or block
    if isinstance(held.get("text"), str):
        return held["text"]
    return f"[{' '.join(filter(None, (block.get('type'), held.get('mimeType'), held.get('uri'))))}]"
