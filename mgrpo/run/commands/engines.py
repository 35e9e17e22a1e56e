"""`mgrpo engines list|add|remove`: engines of a running training, by requests to `run.ranks.engine_requests`."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.config import ConfigError
from mgrpo.config.errors import CommandParser
from mgrpo.processes import local_socket
from mgrpo.run.ranks.engine_requests import NAME

ANSWER_S = 90.0
"""Seconds to wait for the answer: an added engine may wait for room for a minute."""


def ask(output_dir: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request to the run in this folder and return its answer.

    Raises:
        ConfigError: there is no running training, it runs elsewhere, or it has refused.
    """
    try:
        place = json.loads((output_dir / NAME).read_text())
        with (
            local_socket.connect(place["socket"], timeout_s=ANSWER_S) as connection,
            connection.makefile("rw") as lines,
        ):
            lines.write(json.dumps(question) + "\n")
            lines.flush()
            line = lines.readline()
    except FileNotFoundError as err:
        raise ConfigError([f"--run={output_dir}: no run is going on there; give the output_dir of one"]) from err
    except ConnectionRefusedError as err:
        here = socket.gethostname()
        where = (
            "it has ended" if place["host"] == here else f"it runs on {place['host']}, and this is {here}; ask there"
        )
        raise ConfigError([f"--run={output_dir}: the run does not answer: {where}"]) from err
    except (OSError, ValueError, KeyError) as err:
        raise ConfigError([f"--run={output_dir}: the run does not answer: {err}"]) from err
    answer = json.loads(line) if line else {"error": "the run does not answer: is it another user's?"}
    if "error" in answer:
        raise ConfigError([answer["error"]])
    return answer


def engines_command(argv: Sequence[str]) -> int:
    """List a run's engines, add one, or remove one."""
    try:
        flags = parser().parse_args(argv)
        number = {"engine": flags.engine} if flags.command == "remove" else {}
        answer = ask(flags.run, {"command": flags.command, **number})
    except ConfigError as err:
        sys.stderr.write(f"mgrpo engines: {err}\n")
        return 2
    if flags.command == "list":
        for row in (*answer["engines"], *answer["teachers"]):
            failure = f"   last failure: {row['last_failure']}" if row["last_failure"] else ""
            name = row.get("name", f"engine {row['engine']:<3}")
            print(f"{name} {row['state']:<9} starts: {row['starts']}{failure}")
    elif flags.command == "add":
        print(f"engine {answer['engine']} loads its model, and samples after a weight sync")
    else:
        print(f"engine {answer['engine']} is given no more groups, and is ended at the next weight sync")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = CommandParser(
        prog="mgrpo engines", description="The engines of a run that is going on, asked on rank 0's machine."
    )
    commands = made.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    for name, meaning in (
        ("list", "the state of each engine, also of teachers'"),
        ("add", "start one more, which samples after a weight sync"),
        ("remove", "have an engine finish what it samples, and end it at the next weight sync"),
    ):
        command = commands.add_parser(name, help=meaning, description=meaning)
        if name == "remove":
            command.add_argument("engine", type=int, help="its number, see `mgrpo engines list`")
        command.add_argument("--run", type=Path, required=True, metavar="DIR", help="the output_dir of the run")
    return made
