"""`mgrpo agent-endpoint`: an endpoint on another machine, which joins a run and serves agents for as long as that goes on."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence

from mgrpo.environments.endpoint.process import MAX_QUESTION_BYTES, AskedEndpoint
from mgrpo.processes.address import own_address
from mgrpo.processes.distant import join

TOKEN = "RAY_AUTH_TOKEN"
"""The variable with the run's secret."""
JOIN_S = 600.0


def endpoint_command(argv: Sequence[str]) -> int:
    """Serve until the run has ended; returns the exit status if serving cannot begin."""
    options = parser().parse_args(argv)
    host, _, port = options.join.rpartition(":")
    secret = os.environ.get(TOKEN)
    if not host or not port.isdigit():
        return _refused(f"--join {options.join}: expected HOST:PORT, as agent_endpoint_join of the run")
    if not secret:
        return _refused(f"{TOKEN} is not set; expected the run's, by which an endpoint proves that it belongs to it")
    try:
        connection = join((host, int(port)), secret=secret, timeout_s=options.timeout)
        own = options.host or own_address(host)
    except TimeoutError as err:
        return _refused(f"no run has answered at --join {options.join} within --timeout {options.timeout:g} s: {err}")
    except (OSError, ValueError) as err:
        return _refused(f"--join {options.join} does not lead to a run: {err}")
    return asyncio.run(_serve(connection, AskedEndpoint(host=own, port=options.port)))


async def _serve(connection: socket.socket, asked: AskedEndpoint) -> int:
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_QUESTION_BYTES)
    with contextlib.suppress(ConnectionError):
        await asked.serve(reader, writer.write)
    if not asked.is_loaded:
        return _refused(f"the run has refused this endpoint: {TOKEN} differs from the run's")
    # An orderly end would wait for clients.
    os._exit(0)


def parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    found = argparse.ArgumentParser(
        prog="mgrpo agent-endpoint",
        description="Serves agents of a run that goes on elsewhere, at an address of its own, which they must reach. "
        f"{TOKEN} must be set as for the run.",
        allow_abbrev=False,
    )
    found.add_argument("--join", required=True, metavar="HOST:PORT", help="agent_endpoint_join of the run")
    found.add_argument("--host", help="address to serve at; by default this machine's on the way to the run")
    found.add_argument("--port", type=int, default=0, help="by default a free one")
    found.add_argument(
        "--timeout", type=float, metavar="S", default=JOIN_S, help=f"within which the run has begun, {JOIN_S:g} s"
    )
    return found


def _refused(why: str) -> int:
    sys.stderr.write(f"mgrpo: {why}\n")
    return 2
