"""The command line: `mgrpo train [FILE.yaml] [--name value ...]`. `examples/train_grpo.py` is its train command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mgrpo.config import ConfigError, parse

USAGE = "usage: mgrpo train [--config FILE.yaml] [--name value ...]   (under torchrun for more than one rank)\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mgrpo` command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if words[0] != "train":
        sys.stderr.write(f"mgrpo: unknown command {words[0]!r}\n{USAGE}")
        return 2
    return train_command(words[1:], prog="mgrpo train")


def train_command(argv: Sequence[str], *, prog: str | None = None) -> int:
    """Parse, train, and turn a configuration error into one message, printed by rank 0 only."""
    from mgrpo.launch import train

    try:
        config, _ = parse(argv, prog=prog)
        train(config)
    except ConfigError as err:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"mgrpo: {err}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
