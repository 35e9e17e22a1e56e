"""Compare time, memory and accuracy of the ops with their alternatives: one process, the same inputs, in turns.

    python tools/bench_ops.py [--device cpu|cuda] [--groups logits head kept loss experts] [--dtypes float32 bfloat16]
                              [--tokens N] [--vocab N] [--hidden N] [--repeat N]
    python tools/bench_ops.py --markdown        # measure nothing; write the JSON files' figures into benchmarks/README.md

The methods are in bench_ops_methods.py, bench_ops_kept.py and bench_ops_experts.py. Writes benchmarks/ops-<device>.json, for
single groups benchmarks/<groups>-<device>.json. benchmarks/README.md has the protocol and the installation of the peers.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_ops_experts import EXPERT_LAYER
from bench_ops_kept import KEPT
from bench_ops_methods import DTYPES, HEAD, LOGITS, LOGITS_CHUNK, LOSS, Case, Group, Shape
from torch import Tensor

from mgrpo.ops import build_info

GROUPS = {group.name: group for group in (LOGITS, HEAD, KEPT, LOSS, EXPERT_LAYER)}
PEER_PACKAGES = ("megatron-core", "trl", "liger-kernel", "triton", "transformers")
COPY_GOAL = 0.85
README_START = "<!-- figures: written by `python tools/bench_ops.py --markdown` -->"
README_END = "<!-- end of figures -->"
PROTOCOL = (
    "One process, the same inputs for every method. Each method runs once outside the clock for memory and accuracy, a "
    "peer once more before that, which compiles it; then "
    "the methods take turns; for each method the round with the least forward + backward is reported. Time: {clock}. Memory: "
    "peak of the bytes {allocator} during forward and backward, above the inputs. Accuracy: against float64 on the same "
    "inputs, largest absolute error of a logprob, largest error of a gradient, or of the experts' result, divided by its "
    "largest entry."
)
CLOCK = {"cpu": "CPU seconds of the process", "cuda": "between two CUDA events"}
ALLOCATOR = {"cpu": "that torch's CPU allocator reports to its profiler", "cuda": "of torch's CUDA allocator"}


# ---- how it is measured


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    """CPU seconds of the process, or seconds between two CUDA events."""
    if device.type == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """Most bytes in use during a call, above those in use before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Resident memory depends on what the allocator kept from earlier calls; the profiler sees each allocation, also those
    # of C++ code. (It misses the freeing of earlier tensors, but the caller holds those.) These are Kineto's raw records,
    # because profile.events() folds them into the operators.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    records = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(records, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))


def return_free_memory() -> None:
    """Return what the C allocator keeps free to the system, so that every run pays for its own fresh pages.

    Otherwise a buffer costs page faults or nothing depending on what earlier methods left behind: 100 or 5 ms for 250 MiB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


class Run:
    """One forward and backward of a method: `forward()`, then `backward()`."""

    def __init__(self, call: Callable[..., tuple[Tensor | None, ...]], case: Case) -> None:
        self.call, self.cotangents, self.arguments = call, case.cotangents, case.arguments()
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def forward(self) -> None:
        self.outputs = [output for output in self.call(*self.arguments) if output is not None]

    def backward(self) -> None:
        inputs = [x for x in self.arguments if isinstance(x, Tensor) and x.requires_grad]
        cotangents = [g if y.dim() else torch.ones_like(y) for y, g in zip(self.outputs, self.cotangents, strict=True)]
        self.gradients = list(torch.autograd.grad(self.outputs, inputs, cotangents))

    def both(self) -> None:
        self.forward()
        self.backward()


def examine(call: Callable[..., tuple[Tensor | None, ...]], case: Case, device: torch.device) -> dict[str, Any]:
    """Memory and accuracy of one run."""
    run = Run(call, case)
    peak = peak_bytes(device, run.both)
    outputs, gradients = [y.detach() for y in run.outputs], [gradient.detach() for gradient in run.gradients]
    return {
        "peak_mib": peak / 2**20,
        "peak_share": peak / case.logits_bytes,
        **case.errors(outputs, gradients),
    }


def run_case(
    group: Group, calls: dict[str, Callable], case: Case, rounds: int, device: torch.device, absent: dict[str, str]
) -> list[dict[str, Any]]:
    """A row for each method that does this case. Peers that fail move to `absent`."""
    found: dict[str, dict[str, Any]] = {}
    for method in group.methods:
        if method.name not in calls or (case.labels.get("entropy") and not method.has_entropy):
            continue
        try:
            if method.is_peer:  # compiles and tunes, which may take memory
                Run(calls[method.name], case).both()
            found[method.name] = examine(calls[method.name], case, device)
        except Exception as error:  # other libraries may not support this machine: report it and continue
            if not method.is_peer:
                raise
            del calls[method.name]
            absent[method.name] = reason(error)
        else:
            if not method.has_accuracy:
                found[method.name] |= dict.fromkeys(("logprob_error", "entropy_error", "gradient_error"))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for _ in range(rounds):
        for name in found:
            run = Run(calls[name], case)
            return_free_memory()
            times[name].append((seconds(device, run.forward), seconds(device, run.backward)))
            del run
    best = {name: min(timings, key=sum) for name, timings in times.items()}
    baseline = sum(best[group.methods[0].name])
    return [
        {
            "group": group.name,
            **case.labels,
            "method": name,
            "forward_ms": 1e3 * forward,
            "backward_ms": 1e3 * backward,
            "speedup": baseline / (forward + backward),
            **found[name],
            "logits_bytes": case.logits_bytes,
        }
        for name, (forward, backward) in best.items()
    ]


def load(group: Group, device: torch.device) -> tuple[dict[str, Callable], dict[str, str]]:
    """The group's available methods, and why the others are missing."""
    calls, absent = {}, {}
    for method in group.methods:
        try:
            with warnings.catch_warnings(action="ignore" if method.is_peer else "default"):
                calls[method.name] = method.load(device)
        except Exception as error:  # not installed, or broken
            if not method.is_peer:
                raise
            absent[method.name] = reason(error)
    return calls, absent


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else '-'}"


def copy_rate(shape: Shape, device: torch.device) -> float:
    """GB/s of a plain copy, read and write counted: the limit for any method with one read and one write."""
    source = torch.ones(shape.tokens, shape.vocab, device=device)
    target = torch.empty_like(source)
    least = min(seconds(device, lambda: target.copy_(source)) for _ in range(shape.rounds + 1))
    return 2 * source.numel() * source.element_size() / least / 1e9


def add_bandwidth(rows: list[dict[str, Any]], gb_per_s: float) -> None:
    """The rate of the bytes that must move over the copy's rate: forward reads the logits, backward reads and writes."""
    for row in rows:
        row["forward_copy_share"] = row["logits_bytes"] / (row["forward_ms"] * 1e6) / gb_per_s
        row["backward_copy_share"] = 2 * row["logits_bytes"] / (row["backward_ms"] * 1e6) / gb_per_s


def goals(rows: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """The goals of the logits group, each with its worst row among the dtypes that were measured."""

    def worst(method: str, entropy: bool | None, figure: str, pick: Callable) -> float:
        chosen = [row for row in rows if row["method"] == method and entropy in (None, row["entropy"])]
        return pick(row[figure] for row in chosen if row["group"] == LOGITS.name)

    in_place, new_buffer = "mgrpo, in place", "mgrpo, new buffer"
    if device.type == "cuda":
        wanted = [
            ("in place, forward: share of the copy bandwidth", in_place, None, "forward_copy_share", COPY_GOAL),
            ("in place, backward: share of the copy bandwidth", in_place, None, "backward_copy_share", COPY_GOAL),
        ]
    else:
        wanted = [
            ("in place: times faster", in_place, False, "speedup", 6.0),
            ("in place, with entropy: times faster", in_place, True, "speedup", 12.0),
            ("new buffer: times faster", new_buffer, False, "speedup", 2.4),
            ("new buffer, with entropy: times faster", new_buffer, True, "speedup", 6.0),
        ]
    results = [(name, least, worst(method, entropy, figure, min)) for name, method, entropy, figure, least in wanted]
    report = [
        {"goal": name, "at_least": least, "found": found, "met": found >= least} for name, least, found in results
    ]
    share = worst(in_place, None, "peak_share", max)
    memory = {
        "goal": "in place: extra memory over the logits' bytes",
        "below": 0.01,
        "found": share,
        "met": share < 0.01,
    }
    return [*report, memory]


# ---- how it is shown


def cells(row: dict[str, Any]) -> dict[str, str]:
    """A row of figures as text, by heading."""

    def error(value: float | None) -> str:
        return "-" if value is None else f"{value:.0e}"

    output, share = ("logprob", "of logits") if "logprob_error" in row else ("result", "of weights")
    texts = {
        "forward": f"{row['forward_ms']:.1f}",
        "backward": f"{row['backward_ms']:.1f}",
        "total": f"{row['forward_ms'] + row['backward_ms']:.1f}",
        "faster": f"{row['speedup']:.2f}x",
        "peak MiB": f"{row['peak_mib']:.1f}",
        share: f"{100 * row['peak_share']:.1f} %",
        f"{output} err": error(row[f"{output}_error"]),
        "gradient err": error(row["gradient_error"]),
    }
    if "forward_copy_share" in row:
        texts["fwd of copy"] = f"{100 * row['forward_copy_share']:.0f} %"
        texts["bwd of copy"] = f"{100 * row['backward_copy_share']:.0f} %"
    return texts


def describe_case(row: dict[str, Any]) -> str:
    return row.get("case") or f"{row['dtype']}, {'with' if row['entropy'] else 'no'} entropy"


def print_rows(rows: list[dict[str, Any]]) -> None:
    tables = [cells(row) for row in rows]
    widths = {heading: max(len(heading), *(len(table[heading]) for table in tables)) for heading in tables[0]}
    print(f"\n{describe_case(rows[0]):30s}" + "".join(f"  {heading:>{width}s}" for heading, width in widths.items()))
    for row, table in zip(rows, tables, strict=True):
        print(
            f"{row['method']:30s}" + "".join(f"  {table[heading]:>{width}s}" for heading, width in widths.items()),
            flush=True,
        )


def describe_goal(goal: dict[str, Any]) -> str:
    limit = f"at least {goal['at_least']:g}" if "at_least" in goal else f"below {goal['below']:g}"
    return f"{'met' if goal['met'] else 'NOT MET':8s}{goal['goal']}: {goal['found']:.4g}, goal: {limit}"


def ops_markdown(report: dict[str, Any]) -> list[str]:
    """A report of this script as markdown."""
    machine, versions = report["machine"], report["versions"]
    lines = [
        f"### {'Ops' if len(report['groups']) > 1 else next(iter(report['groups'])).capitalize()} on {machine['device']}",
        "",
        f"{machine['cpus']} CPUs, torch threads: {machine['threads']}; "
        + ", ".join(f"{name} {number}" for name, number in versions.items() if number is not None)
        + f". A plain copy moves {machine['copy_gb_per_s']:.1f} GB/s. Times in {report['unit']}."
        + (f" Load before: {machine['load_before']:.1f}." if "load_before" in machine else ""),
        "",
    ]
    if report["goals"]:
        lines += ["| goal | wanted | found | met |", "|---|---|---|---|"]
        for goal in report["goals"]:
            limit = f">= {goal['at_least']:g}" if "at_least" in goal else f"< {goal['below']:g}"
            lines.append(f"| {goal['goal']} | {limit} | {goal['found']:.4g} | {'yes' if goal['met'] else 'no'} |")
        lines.append("")
    for group, about in report["groups"].items():
        size = " x ".join(f"{about[name]} {name}" for name in ("tokens", "vocab", "hidden") if about[name])
        lines += [f"**{about['title'][0].upper()}{about['title'][1:]}**: {size}, best of {about['rounds']} rounds.", ""]
        rows = [row for row in report["rows"] if row["group"] == group]
        headings = list(cells(rows[0]))
        lines += [f"| | {' | '.join(headings)} |", "|---|" + "---:|" * len(headings)]
        for case, case_rows in itertools.groupby(rows, key=describe_case):
            lines.append(f"| *{case}* |" + " |" * len(headings))
            lines += [f"| {row['method']} | {' | '.join(cells(row).values())} |" for row in case_rows]
        lines.append("")
        lines += [f"- {name}: {note}." for name, note in about["notes"].items()]
        lines += [f"- {name}: not run ({why})." for name, why in about["absent"].items()]
        lines.append("")
    return lines


def loop_markdown(report: dict[str, Any]) -> list[str]:
    """A report of tools/bench_loop.py as markdown."""
    results, runs, machine = report["results"], report["runs"], report["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    busy = [run["others_cores"] for run in runs]
    lines = [
        f"### The loop on a CPU: {report['model']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {versions}. {report['protocol']}. Other "
        f"processes kept {min(busy):.2f} to {max(busy):.2f} cores busy meanwhile: the more that is, and the more it differs between "
        "trainers, the less their wall times say; CPU seconds can be compared.",
        "",
        f"| | {' | '.join(result['trainer'] for result in results)} |",
        "|---|" + "---:|" * len(results),
    ]
    for name in (name for name in results[0] if name != "trainer"):
        values = [result.get(name) for result in results]
        lines.append(f"| {name} | " + " | ".join("-" if v is None else f"{v:.3f}" for v in values) + " |")
    lines += ["", "| times as fast | median step | fastest step | CPU seconds |", "|---|---:|---:|---:|"]
    for pair, ratio in report["times_as_fast"].items():
        lines.append(f"| {pair} | " + " | ".join(f"{value:.2f}" for value in ratio.values()) + " |")
    return [*lines, ""]


def sync_markdown(report: dict[str, Any]) -> list[str]:
    """A report of tools/bench_sync.py as markdown."""
    machine = report["machine"]
    lines = [
        "### The weight sync on a CPU",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}. {report['protocol']}",
        "",
        "| | MB | load average | gloo, s | CPU s | shared memory, s | CPU s | times faster |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in report["cases"].values():
        figures = [
            f"{case[transport][name]:.2f}"
            for transport in ("gloo", "shared memory")
            for name in ("seconds_median", "cpu_seconds_median")
        ]
        lines.append(
            f"| {case['what']} | {case['megabytes']:.0f} | {case['load_average']:.1f} | {' | '.join(figures)} | "
            f"{case['times faster']:.1f} |"
        )
    return [*lines, ""]


def figures_markdown(folder: Path) -> str:
    """The figures of all JSON files of a folder."""
    lines: list[str] = []
    ops = [(f"{name}-{device}", ops_markdown) for name in ("ops", "kept", "experts") for device in ("cpu", "cuda")]
    for name, render in (
        *ops,
        ("loop-quickstart", loop_markdown),
        ("loop-smollm2", loop_markdown),
        ("sync-cpu", sync_markdown),
    ):
        path = folder / f"{name}.json"
        if path.exists():
            lines += render(json.loads(path.read_text(encoding="utf-8")))
    return "\n".join(lines)


def write_readme(folder: Path) -> None:
    """Replace the figures between the two marks in the folder's README."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8")
    if text.count(README_START) != 1 or text.count(README_END) != 1:
        raise SystemExit(f"{path} must hold the lines {README_START!r} and {README_END!r} once each")
    before, rest = text.split(README_START)
    _, after = rest.split(README_END)
    path.write_text(f"{before}{README_START}\n\n{figures_markdown(folder)}{README_END}{after}", encoding="utf-8")
    print(f"figures written to {path}")


# ---- the run


def machine(device: torch.device) -> dict[str, Any]:
    """Where the figures were taken."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else platform.processor()
    about = {"device": name, "cpus": os.cpu_count(), "load_before": os.getloadavg()[0]}
    return {**about, "threads": torch.get_num_threads(), **build_info()}


def versions() -> dict[str, str | None]:
    """Versions of torch, mgrpo and the peers; None: not installed."""
    found: dict[str, str | None] = {"torch": torch.__version__}
    for package in ("mgrpo", *PEER_PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def chosen_shape(args: argparse.Namespace, group: Group) -> Shape:
    """The group's own size, overridden by the command line."""
    default = group.shapes[args.device]
    return Shape(
        tokens=args.tokens or default.tokens,
        vocab=(args.vocab or default.vocab) if default.vocab else 0,
        hidden=(args.hidden or default.hidden) if default.hidden else 0,
        rounds=args.repeat or default.rounds,
    )


def run_group(
    group: Group, shape: Shape, device: torch.device, *, dtypes: Sequence[torch.dtype], copy_gb_per_s: float
) -> tuple[dict, list[dict]]:
    """The report's description of a group, and its rows, printed as they are measured."""
    calls, absent = load(group, device)
    size = ", ".join(f"{name} {getattr(shape, name)}" for name in ("tokens", "vocab", "hidden") if getattr(shape, name))
    print(f"\n{group.title}: {size}; best of {shape.rounds} rounds")
    rows: list[dict[str, Any]] = []
    for case in group.cases(shape, device, dtypes):
        case_rows = run_case(group, calls, case, shape.rounds, device, absent)
        if device.type == "cuda" and group.is_bandwidth_bound:
            add_bandwidth(case_rows, copy_gb_per_s)
        print_rows(case_rows)
        rows += case_rows
    measured = {row["method"] for row in rows}
    notes = {
        method.name: method.note.format(logits_chunk=LOGITS_CHUNK[device.type])
        for method in group.methods
        if method.note and method.name in measured
    }
    print("".join(f"\n{name}: {note}" for name, note in notes.items()))
    print("".join(f"absent: {name} ({why})\n" for name, why in absent.items()), end="", flush=True)
    about = {"title": group.title, "tokens": shape.tokens, "vocab": shape.vocab, "hidden": shape.hidden}
    return {**about, "rounds": shape.rounds, "notes": notes, "absent": absent}, rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="the group loss is always float32"
    )
    parser.add_argument("--tokens", type=int, help="default: depends on group and device, see benchmarks/README.md")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--hidden", type=int, help="hidden size of the group head")
    parser.add_argument("--repeat", type=int, help="measured rounds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder for the JSON file")
    parser.add_argument("--markdown", action="store_true", help="only write the figures into the folder's README.md")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.markdown:
        write_readme(args.out)
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise each profile writes two lines
    device = torch.device(args.device)
    unit = "CPU ms" if args.device == "cpu" else "ms"
    where = machine(device) | {"copy_gb_per_s": copy_rate(chosen_shape(args, LOGITS), device)}
    print(
        f"{where['device']}, torch {torch.__version__}, {where['threads']} threads; times in {unit}; a plain copy moves "
        f"{where['copy_gb_per_s']:.1f} GB/s"
    )
    groups, rows = {}, []
    for name in args.groups:
        about, group_rows = run_group(
            GROUPS[name],
            chosen_shape(args, GROUPS[name]),
            device,
            dtypes=[DTYPES[dtype] for dtype in args.dtypes],
            copy_gb_per_s=where["copy_gb_per_s"],
        )
        groups[name] = about
        rows += group_rows
    if dist.is_initialized():
        dist.destroy_process_group()
    found_goals = goals(rows, device) if LOGITS.name in groups else []
    print("".join(f"\n{describe_goal(goal)}" for goal in found_goals))
    report = {
        "protocol": PROTOCOL.format(clock=CLOCK[args.device], allocator=ALLOCATOR[args.device]),
        "unit": unit,
        "machine": where,
        "versions": versions(),
        "groups": groups,
        "goals": found_goals,
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    name = "ops" if args.groups == list(GROUPS) else "-".join(args.groups)
    path = args.out / f"{name}-{args.device}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
