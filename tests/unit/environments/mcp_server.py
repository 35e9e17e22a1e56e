"""A server for the tests of the MCP adaptor; the one argument is its transport, or else a port for http."""

import os
import sys

try:
    from mcp.server.fastmcp import FastMCP as Program
except ImportError:
    from mcp.server.mcpserver import MCPServer as Program

counted = [0]


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def count() -> str:
    """Counts the calls of this server."""
    counted[0] += 1
    return f"call {counted[0]}"


def fail(text: str) -> str:
    """Fails."""
    raise RuntimeError(text)


def leave() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    tools = [add, count, fail, leave]
    if sys.argv[1] == "stdio":
        program = Program("test")
        for tool in tools:
            program.add_tool(tool)
        program.run("stdio")
    else:
        port = int(sys.argv[1])
        is_old = Program.__name__ == "FastMCP"
        program = Program("test", host="127.0.0.1", port=port) if is_old else Program("test")
        for tool in tools:
            program.add_tool(tool)
        program.run("streamable-http", **({} if is_old else {"host": "127.0.0.1", "port": port}))
