"""The meaning of the figures of tools/gpu_check.py: which modes of training disagree, and the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

LOSS_TOLERANCE, NORM_TOLERANCE = 0.02, 0.05
"""Relative: what bf16 may change in the first step. On a CPU the small models differ by 0.0003 and 0.002."""


def mode_problems(modes: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence for each mode that failed, computed something else than its reference, or broke the plan's promise."""
    by_name = {mode["mode"]: mode for mode in modes}
    problems = []
    for name, mode in by_name.items():
        if mode["status"] != "passed":
            problems.append(f"{name}: {mode['error']}")
            continue
        reference = by_name.get(mode["equals"] or "")
        if reference and reference["status"] == "passed":
            problems += [f"{name}: {difference}" for difference in differences(mode, reference)]
        if mode["is_planned"] and mode["peak_gib"] is not None and mode["peak_gib"] > mode["allowed_gib"]:
            problems.append(f"{name}: {mode['peak_gib']:.2f} GiB, but the plan allows {mode['allowed_gib']:.2f}")
    return problems


def differences(mode: dict[str, Any], reference: dict[str, Any]) -> Iterator[str]:
    """Where the first step is not the reference's."""
    for name, tolerance in (("losses", LOSS_TOLERANCE), ("grad_norms", NORM_TOLERANCE)):
        got, expected = mode[name][0], reference[name][0]
        if abs(got - expected) > tolerance * abs(expected):
            yield f"the first of {name} is {got:.5g}, {expected:.5g} in {reference['mode']}"


def markdown(report: dict[str, Any], *, title: str = "GPU check") -> str:
    """The report as a page."""
    machine = report["machine"]
    lines = [
        f"# {title}: {machine.get('gpu', 'CPU')}",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "",
        ", ".join(f"{name} {number}" for name, number in report["versions"].items()) + ".",
        "",
        report["protocol"],
        "",
        "| part | outcome | s | |",
        "|---|---|---:|---|",
    ]
    for name, part in report["parts"].items():
        note = part["note"].replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {part['status']} | {part['seconds']:.0f} | {note} |")
    if goals := report["parts"].get("ops", {}).get("figures", {}).get("goals"):
        lines += ["", "## Ops", "", "| goal | wanted | found |", "|---|---:|---:|"]
        lines += [f"| {goal['goal']} | {limit(goal)} | {goal['found']:.4g} |" for goal in goals]
    if modes := report["parts"].get("training", {}).get("figures", {}).get("modes"):
        lines += ["", "## Training on one device", "", *mode_table(modes)]
    for name, part in report["parts"].items():
        if part["output"]:
            lines += ["", f"## Output of {name}", "", "```", part["output"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def limit(goal: dict[str, Any]) -> str:
    return f">= {goal['at_least']:g}" if "at_least" in goal else f"< {goal['below']:g}"


def mode_table(modes: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each mode; memory in GiB: measured, planned, and planned with the allowance for fragmentation."""
    headings = ["mode", "loss", "gradient norm", "tokens/s", "MFU", "peak", "planned", "allowed"]
    lines = [f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
    for mode in modes:
        if mode["status"] != "passed":
            lines.append(f"| {mode['mode']} | {mode['error']} |" + " |" * (len(headings) - 2))
            continue
        cells = [
            mode["mode"],
            f"{mode['losses'][0]:.5f}",
            f"{mode['grad_norms'][0]:.4f}",
            f"{mode['tokens_per_s']:.0f}",
            "-" if mode["mfu"] is None else f"{100 * mode['mfu']:.1f} %",
            "-" if mode["peak_gib"] is None else f"{mode['peak_gib']:.2f}",
            f"{mode['planned_gib']:.2f}",
            f"{mode['allowed_gib']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
