"""`python -m mgrpo.sandbox`: the code service."""

from __future__ import annotations

import sys

from mgrpo.sandbox.server import serve_command

if __name__ == "__main__":
    raise SystemExit(serve_command(sys.argv[1:]))
