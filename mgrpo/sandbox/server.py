"""The command that serves the sandbox over HTTP: `mgrpo code-server`, or `python -m mgrpo.sandbox`."""

from __future__ import annotations

import argparse
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
    from mgrpo.sandbox.sandbox import Sandbox

    sandbox = Sandbox(memory_mb=options.memory_mb, num_slots=options.workers, accept_risk=options.accept_risk)
    try:
        isolation = sandbox.start()
    except (ValueError, RuntimeError) as err:
        sandbox.close()
        sys.stderr.write(f"mgrpo: {err}\n")
        return 2
    sys.stderr.write(f"mgrpo: sandbox with {sandbox.num_slots} slots: {isolation.describe()}\n")
    app = create_app(sandbox, max_waiting=options.queue)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mgrpo code-server", description="Runs programs against tests for the verifiers code and code_stdio."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; requests are not authenticated")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--workers", type=_positive, default=None, help="programs run at a time; default: one per core")
    parser.add_argument("--memory_mb", type=_positive, default=1024, help="memory of a program in MiB")
    parser.add_argument("--queue", type=_positive, default=1024, help="maximum number of waiting requests")
    parser.add_argument("--accept_risk", action="store_true", help="run programs even where they cannot be isolated")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value
