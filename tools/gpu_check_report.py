"""The meaning of the figures of tools/gpu_check.py: modes of training that disagree, classes of kernels, and the report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

LOSS_TOLERANCE, NORM_TOLERANCE = 0.02, 0.05
"""Relative: what bf16 may change in the first step. On a CPU the small models differ by 0.0003 and 0.002."""
COSTLIEST = 35
"""Kernels in the table of a profile."""
KERNELS: dict[str, str] = {
    "memory copies": r"^Mem(cpy|set) |^aten::copy_$|copy_kernel|CatArrayBatchedCopy",
    "collectives": r"nccl|^c10d::",
    # The delta rule of flash-linear-attention is attention too; triton_tem are FlexAttention's.
    "attention": (
        r"flash|fmha|attention|attn|sdpa|^triton_tem_|^chunk_|delta_rule|^recompute_w_u_|^prepare_wy_|^solve_tril|"
        r"^merge_\d+x\d+_to_"
    ),
    "optimizer": r"multi_tensor_apply|lpnorm_cleanup|adam|_foreach_",
    "LM head and loss": r"mgrpo::|logprobs|policy_?loss|cross_entropy|nll_loss|log_?softmax",
    "matrix products": (
        r"gemm|nvjet|cutlass|cublas|splitk|gemv|trsm|triangular|^aten::(mm|addmm|bmm|baddbmm|dot|mv|_grouped_mm)$"
    ),
    "norms and elementwise": (
        r"elementwise|^triton_(poi|red|per)_|reduce_kernel|norm|swiglu|silu|rope|softmax|index|gather|scatter|sort|topk|"
        r"scan|cumsum|fill|cub::|^aten::"
    ),
}
"""Classes of kernels, and of torch's operations on a CPU, each with a pattern of their names; the first that matches counts."""


def kernel_class(name: str) -> str:
    """Class of a kernel by its name, "other" where no pattern matches; an LM head's products are matrix products."""
    return next((kind for kind, pattern in KERNELS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end): kernels of several streams overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def time_shares(kernels: Mapping[str, float], *, busy_s: float, wall_s: float) -> dict[str, float]:
    """Shares of the kernels' time by class, which add up to 1, and "idle": the share of the wall time without any kernel.

    Args:
        kernels: seconds by kernel.
        busy_s: seconds in which at least one kernel ran; less than their sum where streams overlap.
    """
    total = sum(kernels.values()) or 1.0
    shares = dict.fromkeys((*KERNELS, "other"), 0.0)
    for name, seconds in kernels.items():
        shares[kernel_class(name)] += seconds / total
    return shares | {"idle": max(0.0, 1 - busy_s / wall_s)}


def kernel_table(seconds: Mapping[str, float], calls: Mapping[str, int]) -> list[str]:
    """The costliest kernels, each with its share of all kernels' time and its class."""
    total = sum(seconds.values()) or 1.0
    lines = [f"{'ms':>10} {'share':>7} {'calls':>6}  {'class':22} kernel"]
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:COSTLIEST]:
        own = seconds[name]
        lines.append(f"{own * 1e3:10.3f} {own / total:7.1%} {calls[name]:6}  {kernel_class(name):22} {name[:160]}")
    return lines


def numbered(modes: Iterable[str]) -> Iterator[str]:
    """Modes by the names of their records: the second `bf16` is `bf16 (2)`. Numbered names stay as they are."""
    counts: Counter[str] = Counter()
    for name in modes:
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name} ({counts[name]})"


def mode_problems(modes: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence for each mode that failed, computed something else than its reference, or broke the plan's promise."""
    by_name = {mode["mode"]: mode for mode in reversed(modes)}
    problems = []
    for mode in modes:
        name = mode["mode"]
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
        lines += ["", "## Training on one device", "", *mode_table(modes), *share_table(modes)]
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


def share_table(modes: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each profiled mode: shares of the kernels' time by class, and of the step's time without a kernel."""
    profiled = [mode for mode in modes if "profile" in mode]
    if not profiled:
        return []
    headings = ["mode", *KERNELS, "other", "idle"]
    lines = ["", f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
    for mode in profiled:
        shares = mode["profile"]["shares"]
        lines.append(f"| {mode['mode']} | {' | '.join(f'{100 * shares[kind]:.1f} %' for kind in headings[1:])} |")
    return lines
