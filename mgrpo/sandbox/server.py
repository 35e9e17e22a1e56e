"""The command that serves the sandbox over HTTP: `mgrpo code-server`, or `python -m mgrpo.sandbox`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

DEFAULT_PORT = 1234


def serve_command(argv: Sequence[str]) -> int:
    """Serve until interrupted; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        import uvicorn
    except ImportError:
        sys.stderr.write("mgrpo: the code service needs uvicorn; install it with: pip install uvicorn\n")
        return 2
    from mgrpo.sandbox.app import create_app
    from mgrpo.sandbox.code_requests import reading_processes
    from mgrpo.sandbox.connection import BoundedConnection, listen
    from mgrpo.sandbox.interpreters import Kernels
    from mgrpo.sandbox.sandbox import Sandbox
    from mgrpo.sandbox.sessions import Sessions

    try:
        listening = listen(options.host, options.port)
    except OSError as err:
        sys.stderr.write(f"mgrpo: cannot listen at --host {options.host} --port {options.port}: {err.strerror}\n")
        return 2
    sandbox = Sandbox(memory_mb=options.memory_mb, num_slots=options.workers, accept_risk=options.accept_risk)
    with listening:
        try:
            isolation = sandbox.start()
        except (ValueError, RuntimeError) as err:
            sandbox.close()
            sys.stderr.write(f"mgrpo: {err}\n")
            return 2
        host = f"[{options.host}]" if ":" in options.host else options.host
        sys.stderr.write(
            f"mgrpo: code service at http://{host}:{listening.getsockname()[1]}, programs run at a time: "
            f"{sandbox.num_slots}; {isolation.describe()}\n"
        )
        kernels = Kernels(memory_mb=options.memory_mb, accept_risk=options.accept_risk, walls=[isolation.walls])
        sessions = Sessions(kernels, num_at_once=sandbox.num_slots, max_waiting=options.queue)
        app = create_app(sandbox, sessions=sessions, max_waiting=options.queue, start_readers=reading_processes)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(app, http=BoundedConnection, log_level="warning")).run(sockets=[listening])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mgrpo code-server",
        description="Runs programs against tests for the verifiers code and code_stdio, and code for the tool python.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; requests are not authenticated")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help="0: any free one")
    parser.add_argument("--workers", type=_positive, default=None, help="programs run at a time; default: one per core")
    parser.add_argument("--memory_mb", type=_positive, default=1024, help="memory of a program in MiB")
    parser.add_argument("--queue", type=_positive, default=1024, help="maximum number of waiting requests")
    parser.add_argument("--accept_risk", action="store_true", help="run programs even where they cannot be isolated")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a port from 1 to 65535, or 0 for any free one")
    return int(text)
