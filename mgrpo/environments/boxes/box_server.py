"""The command that opens boxes for runs of other machines: `mgrpo box-server`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Sequence

from mgrpo.environments.boxes.box import MIB, Bounds, Box, BoxError
from mgrpo.environments.boxes.opening import CONTAINERS, check_box, open_box
from mgrpo.environments.boxes.remote_box import TOKEN, TOKEN_FILE, token

DEFAULT_PORT = 1235
_LEAST_TOKEN_CHARS = 16


def box_server_command(argv: Sequence[str]) -> int:
    """Serve until interrupted; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        import uvicorn

        from mgrpo.environments.boxes.box_app import BoxApp
        from mgrpo.sandbox.connection import BoundedConnection, listen

        secret = token() or ""
        if len(secret) < _LEAST_TOKEN_CHARS:
            raise ValueError(
                f"whoever has the token runs programs here: set {TOKEN_FILE} to a file that holds it, or {TOKEN}, to at least "
                f"{_LEAST_TOKEN_CHARS} characters (python -c 'import secrets; print(secrets.token_urlsafe())')"
            )
        granted = Bounds(
            image=options.image,
            network=options.network,
            memory_bytes=options.memory_mb * MIB,
            disk_bytes=options.disk_mb * MIB,
            max_processes=options.processes,
            cpus=options.cpus,
        )
        asyncio.run(check_box(options.box, granted))
    except (ImportError, ValueError, BoxError, OSError) as err:
        sys.stderr.write(f"mgrpo: {err}\n")
        return 2
    try:
        listening = listen(options.host, options.port)
    except OSError as err:
        sys.stderr.write(f"mgrpo: cannot listen at --host {options.host} --port {options.port}: {err.strerror}\n")
        return 2

    async def open_granted(wanted: Bounds) -> Box:
        return await open_box(options.box, within(wanted, granted, takes_images=options.box in CONTAINERS))

    app = BoxApp(open_granted, token=secret, max_boxes=options.boxes)
    host = f"[{options.host}]" if ":" in options.host else options.host
    with listening:
        sys.stderr.write(f"mgrpo: box server at http://{host}:{listening.getsockname()[1]}, boxes: {options.box}\n")
        config = uvicorn.Config(app, http=BoundedConnection, log_level="warning", timeout_graceful_shutdown=5)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    return 0


def within(wanted: Bounds, granted: Bounds, *, takes_images: bool) -> Bounds:
    """Bounds that a client is granted of those it requests.

    Args:
        takes_images: whether a client's image is that of a container; in local boxes it would be a folder of this machine.
    Raises:
        ValueError: it wants a network or an image that is not granted.
    """
    if wanted.image and wanted.image != granted.image and not takes_images:
        raise ValueError(
            f"agent_image={wanted.image!r}, which this box server does not take: its boxes are no containers, and a folder of its "
            "machine is its owner's to name (--image)"
        )
    if wanted.network and not granted.network:
        raise ValueError("agent_network=true, which this box server does not grant (--network)")
    return dataclasses.replace(
        wanted,
        image=wanted.image or granted.image,
        memory_bytes=min(wanted.memory_bytes, granted.memory_bytes),
        disk_bytes=min(wanted.disk_bytes, granted.disk_bytes),
        max_processes=min(wanted.max_processes, granted.max_processes),
        cpus=min((cpus for cpus in (wanted.cpus, granted.cpus) if cpus is not None), default=None),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mgrpo box-server",
        description=f"Opens boxes for agents of runs on other machines, which set agent_box to its URL. The token is in {TOKEN} or the file {TOKEN_FILE}.",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; HTTP without TLS: tunnel it, or use a private network",
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0: any free one")
    parser.add_argument("--box", default="local", help="kind of its boxes: local, none, docker, podman")
    parser.add_argument("--image", default=None, help="image of boxes for which a run names none")
    parser.add_argument("--boxes", type=int, default=64, help="at once; further ones are refused")
    parser.add_argument("--memory_mb", type=int, default=4096, help="most memory of a box in MiB")
    parser.add_argument("--disk_mb", type=int, default=1024, help="most that a box may write, in MiB")
    parser.add_argument("--processes", type=int, default=256, help="most processes of a box")
    parser.add_argument("--cpus", type=float, default=None, help="most cores of a container; default: all")
    parser.add_argument("--network", action="store_true", help="allow boxes with a network")
    return parser
