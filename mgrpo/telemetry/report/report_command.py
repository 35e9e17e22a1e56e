"""The commands `mgrpo report DIR ...` and `mgrpo watch DIR ...`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mgrpo.telemetry.files import write_whole
from mgrpo.telemetry.report.compare import comparison
from mgrpo.telemetry.report.page import write_report

COMPARISON = "comparison.html"
MAX_RUNS = 20


def report_command(argv: Sequence[str]) -> int:
    """Write the report of a run or of an evaluation again, or a comparison of several; returns the exit status."""
    made = argparse.ArgumentParser(
        prog="mgrpo report",
        description=f"Writes the report of a run again; of several runs, a page that compares them: {COMPARISON} in this folder.",
    )
    made.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="the output_dir of a run")
    made.add_argument("--out", type=Path, metavar="FILE", help="where to write the page instead")
    try:
        options = made.parse_args(argv)
    except SystemExit as err:
        return int(err.code or 0)
    try:
        if len(options.folders) == 1:
            path = write_report(options.folders[0], options.out)
        else:
            _check_number(options.folders)
            path = options.out or Path(COMPARISON)
            write_whole(path, comparison(options.folders))
    except (ValueError, OSError) as err:
        sys.stderr.write(f"mgrpo report: {err}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


def watch_command(argv: Sequence[str]) -> int:
    """Serve a page that follows a run, or compares several, until interrupted; returns the exit status."""
    made = argparse.ArgumentParser(
        prog="mgrpo watch",
        description="Serves a page on this machine that follows a run, also one that has not begun yet; or that compares several.",
    )
    made.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="the output_dir of a run")
    made.add_argument("--port", type=int, default=0, help="where to listen; 0, the default: any free port")
    made.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen at; any but this machine's own shows prompts and answers to whoever reaches it",
    )
    made.add_argument("--open", action="store_true", help="open the page in a browser")
    try:
        options = made.parse_args(argv)
    except SystemExit as err:
        return int(err.code or 0)
    from mgrpo.telemetry.report.watch import PageServer

    try:
        _check_number(options.folders)
        server = PageServer(options.folders, host=options.host, port=options.port)
    except (OSError, OverflowError, ValueError) as err:
        sys.stderr.write(f"mgrpo watch: cannot listen at --host {options.host} --port {options.port}: {err}\n")
        return 2
    with server:
        sys.stdout.write(f"{server.url}   (Ctrl-C ends it)\n")
        sys.stdout.flush()
        if options.open:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stderr.write("mgrpo: interrupted\n")
            return 128 + signal.SIGINT
    return 0


def _check_number(folders: Sequence[Path]) -> None:
    if len(folders) > MAX_RUNS:
        raise ValueError(f"{len(folders)} runs were given, and a page compares at most {MAX_RUNS}; give fewer")
