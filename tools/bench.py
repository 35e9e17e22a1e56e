"""Benchmarks: a case measures what a page says, with the machine, the versions and the protocol.

    python tools/bench.py CASE [--repeats N] [--output FILE]      CASE --help has the options of the case
    python tools/bench.py --markdown                              write the figures of the JSON files into benchmarks/README.md

A case is a module of tools/bench_cases: a docstring, the `PROTOCOL` (in which options stand in braces), the `PACKAGES` whose versions
count, `REPEATS`, and `measure`, which returns the rest of the file. A case whose options choose among files has `file_name`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CASES = (
    "data", "endpoint", "engine_families", "loop", "ops", "precision", "rewards", "routing_replay", "save", "sync", "turns",
)  # fmt: skip
SETTINGS = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "KINETO_LOG_LEVEL": "99",
}  # fmt: skip
"""Variables of the environment, unless it has others. Spinning threads are twenty times slower on a machine that does anything else."""


def main(words: Sequence[str] | None = None) -> None:
    """Run one case, or write the page."""
    head = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    head.add_argument("case", choices=CASES, nargs="?")
    head.add_argument("--markdown", action="store_true")
    words = sys.argv[1:] if words is None else words
    chosen = head.parse_args(words[:1])
    if chosen.markdown:
        importlib.import_module("tools.bench_cases.readme_figures").write_readme(ROOT / "benchmarks")
        return
    if chosen.case is None:
        head.error(f"a case is missing: {', '.join(CASES)}")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    case = importlib.import_module(f"tools.bench_cases.{chosen.case}")
    parser = argparse.ArgumentParser(
        prog=f"bench.py {chosen.case}", description=case.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=case.REPEATS, help="how often each figure is taken")
    parser.add_argument("--output", type=Path, help="default: a file of benchmarks/")
    if hasattr(case, "add_options"):
        case.add_options(parser)
    args = parser.parse_args(words[1:])
    name = case.file_name(args) if hasattr(case, "file_name") else chosen.case
    output = args.output or ROOT / "benchmarks" / f"{name}.json"
    where = machine()
    found = case.measure(args)
    report = {
        "protocol": case.PROTOCOL.format(**vars(args)),
        "machine": where | found.pop("machine", {}),
        "versions": versions(case.PACKAGES),
        **rounded(found),
    }
    for name, rows in found.items():
        if isinstance(rows, list) and rows:
            print(f"\n{name}")
            show(rows)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {output}")


def machine() -> dict[str, Any]:
    """The place of the figures; the load is that before the first of them."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """None: not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def rounded(value: Any) -> Any:
    """Six significant digits; what is no number (NaN) as None."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value else None
    return value


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of rows, with the columns of the first and the last; lists are left out."""
    headings = [name for name, value in {**rows[-1], **rows[0]}.items() if not isinstance(value, list)]
    texts = [[text_of(row.get(name)) for name in headings] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *texts, strict=True)]
    for line in (headings, *texts):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)), flush=True)


def text_of(value: object) -> str:
    """A figure as text."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value > 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


if __name__ == "__main__":
    main()
