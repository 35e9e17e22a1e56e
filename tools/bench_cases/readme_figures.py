"""The figures of the JSON files as the tables of benchmarks/README.md."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

README_START = "<!-- figures: written by `python tools/bench.py --markdown` -->"
README_END = "<!-- end of figures -->"


def write_readme(folder: Path) -> None:
    """Replace the figures between the two marks in the folder's README."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8")
    if text.count(README_START) != 1 or text.count(README_END) != 1:
        raise SystemExit(f"{path} must hold the lines {README_START!r} and {README_END!r} once each")
    before, rest = text.split(README_START)
    _, after = rest.split(README_END)
    path.write_text(f"{before}{README_START}\n\n{figures(folder)}{README_END}{after}", encoding="utf-8")
    print(f"figures written to {path}")


def figures(folder: Path) -> str:
    """The figures of all files of a folder that have tables."""
    lines: list[str] = []
    for name, render in RENDERERS.items():
        if (path := folder / f"{name}.json").exists():
            lines += render(json.loads(path.read_text(encoding="utf-8")))
    return "\n".join(lines)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    first, *others = (f"| {' | '.join(row)} |".replace("|  ", "| ") for row in (headings, *rows))
    return [first, "|---|" + "---:|" * (len(headings) - 1), *others]


def versions(report: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number is not None)


def ops(report: dict[str, Any]) -> list[str]:
    """A report of the case ops."""
    machine, groups = report["machine"], report["groups"]
    lines = [
        f"### {'Ops' if len(groups) > 1 else next(iter(groups)).capitalize()} on {machine['device']}",
        "",
        f"{machine['cores']} CPUs, torch threads: {machine['threads']}; {versions(report)}. A plain copy moves "
        f"{machine['copy_gb_per_s']:.1f} GB/s. Times in {report['unit']}."
        + (f" Load before: {machine['load_before']:.1f}." if "load_before" in machine else ""),
        "",
    ]
    if report["goals"]:
        lines += ["| goal | wanted | found | met |", "|---|---|---|---|"]
        for goal in report["goals"]:
            limit = f">= {goal['at_least']:g}" if "at_least" in goal else f"< {goal['below']:g}"
            lines.append(f"| {goal['goal']} | {limit} | {goal['found']:.4g} | {'yes' if goal['met'] else 'no'} |")
        lines.append("")
    for group, about in groups.items():
        size = " x ".join(f"{about[name]} {name}" for name in ("tokens", "vocab", "hidden") if about[name])
        lines += [f"**{about['title'][0].upper()}{about['title'][1:]}**: {size}, best of {about['rounds']} rounds.", ""]
        rows = [row for row in report["rows"] if row["group"] == group]
        headings = list(cells(rows[0]))
        texts: list[list[str]] = []
        for case, own in itertools.groupby(rows, key=case_of):
            texts += [[f"*{case}*", *[""] * len(headings)], *([row["method"], *cells(row).values()] for row in own)]
        lines += [*table(["", *headings], texts), ""]
        lines += [f"- {name}: {note}." for name, note in about["notes"].items()]
        lines += [f"- {name}: not run ({why})." for name, why in about["absent"].items()]
        lines.append("")
    return lines


def case_of(row: dict[str, Any]) -> str:
    return row.get("case") or f"{row['dtype']}, {'with' if row['entropy'] else 'no'} entropy"


def cells(row: dict[str, Any]) -> dict[str, str]:
    """A row of figures as text, by heading."""
    output, share = ("logprob", "of logits") if "logprob_error" in row else ("result", "of weights")
    texts = {
        "forward": f"{row['forward_ms']:.1f}",
        "backward": f"{row['backward_ms']:.1f}",
        "total": f"{row['forward_ms'] + row['backward_ms']:.1f}",
        "faster": f"{row['speedup']:.2f}x",
        "peak MiB": f"{row['peak_mib']:.1f}",
        share: f"{100 * row['peak_share']:.1f} %",
        f"{output} err": f"{row[f'{output}_error']:.0e}",
        "gradient err": f"{row['gradient_error']:.0e}",
    }
    if "forward_copy_share" in row:
        texts["fwd of copy"] = f"{100 * row['forward_copy_share']:.0f} %"
        texts["bwd of copy"] = f"{100 * row['backward_copy_share']:.0f} %"
    return texts


def loop(report: dict[str, Any]) -> list[str]:
    """A report of the case loop."""
    results, machine = report["results"], report["machine"]
    busy = [run["others_cores"] for run in report["runs"]]
    names = [name for name in results[0] if name != "trainer"]
    values = [[name, *("-" if (v := each.get(name)) is None else f"{v:.3f}" for each in results)] for name in names]
    ratios = [[pair, *(f"{value:.2f}" for value in own.values())] for pair, own in report["times_as_fast"].items()]
    return [
        f"### The loop on a CPU: {report['model']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {versions(report)}. {report['protocol']}. Other "
        f"processes kept {min(busy):.2f} to {max(busy):.2f} cores busy meanwhile: the more that is, and the more it differs between "
        "trainers, the less their wall times say; CPU seconds can be compared.",
        "",
        *table(["", *(result["trainer"] for result in results)], values),
        "",
        *table(["times as fast", "median step", "fastest step", "CPU seconds"], ratios),
        "",
    ]


def sync(report: dict[str, Any]) -> list[str]:
    """A report of the case sync."""
    machine = report["machine"]
    rows = [
        [
            case["what"],
            f"{case['megabytes']:.0f}",
            f"{case['load_average']:.1f}",
            *(f"{case[way][name]:.2f}" for way in WAYS for name in ("seconds_median", "cpu_seconds_median")),
            f"{case['times faster']:.1f}",
        ]
        for case in report["cases"].values()
    ]
    headings = ["", "MB", "load average", *(text for way in WAYS for text in (f"{way}, s", "CPU s")), "times faster"]
    return [
        "### The weight sync on a CPU",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {versions(report)}. {report['protocol']}",
        "",
        *table(headings, rows),
        "",
    ]


WAYS = ("gloo", "shared memory")
RENDERERS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    **{f"{name}-{device}": ops for name in ("ops", "kept", "experts") for device in ("cpu", "cuda")},
    "loop-quickstart": loop,
    "loop-smollm2": loop,
    "sync-cpu": sync,
}
