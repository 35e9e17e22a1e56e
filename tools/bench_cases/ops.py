"""Time, memory and accuracy of the ops and of their alternatives: one process, the same inputs, in turns.

benchmarks/README.md has the default sizes and the installation of the peers. A run of single groups writes a file named after them.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgrpo.ops import build_info
from tools.bench import cpu_model
from tools.bench_cases.ops_methods import DTYPES, GROUPS, LOGITS_CHUNK, Case, Group, Shape

REPEATS = None
PACKAGES = ("torch", "mgrpo", "megatron-core", "trl", "liger-kernel", "triton", "transformers")
COPY_GOAL = 0.85
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="loss: float32 alone")
    for name in ("tokens", "vocab", "hidden"):
        parser.add_argument(f"--{name}", type=int, help="default: depends on group and device")


def file_name(args: argparse.Namespace) -> str:
    return f"{'ops' if args.groups == list(GROUPS) else '-'.join(args.groups)}-{args.device}"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device, groups, rows = torch.device(args.device), dict[str, Any](), list[dict[str, Any]]()
    args.clock, args.allocator = CLOCK[args.device], ALLOCATOR[args.device]
    gb_per_s = copy_rate(chosen_shape(args, GROUPS["logits"]), device)
    for name in args.groups:
        groups[name], found = run_group(GROUPS[name], chosen_shape(args, GROUPS[name]), device, args.dtypes)
        if device.type == "cuda" and name == "logits":
            add_bandwidth(found, gb_per_s)
        rows += found
    if dist.is_initialized():
        dist.destroy_process_group()
    where = {"device": torch.cuda.get_device_name() if device.type == "cuda" else cpu_model()}
    return {
        "unit": "CPU ms" if args.device == "cpu" else "ms",
        "machine": {**where, "threads": torch.get_num_threads(), "copy_gb_per_s": gb_per_s, **build_info()},
        "groups": groups,
        "goals": goals(rows, device) if "logits" in groups else [],
        "rows": rows,
    }


def chosen_shape(args: argparse.Namespace, group: Group) -> Shape:
    """The group's own size, overridden by the command line."""
    default = group.shapes[args.device]
    return Shape(
        tokens=args.tokens or default.tokens,
        vocab=(args.vocab or default.vocab) if default.vocab else 0,
        hidden=(args.hidden or default.hidden) if default.hidden else 0,
        rounds=args.repeats or default.rounds,
    )


def run_group(group: Group, shape: Shape, device: torch.device, dtypes: list[str]) -> tuple[dict, list[dict]]:
    """The report's description of a group, and its rows."""
    calls, absent, rows = {}, {}, list[dict[str, Any]]()
    for method in group.methods:
        try:
            with warnings.catch_warnings(action="ignore" if method.is_peer else "default"):
                calls[method.name] = method.load(device)
        except Exception as error:  # not installed, or broken
            if not method.is_peer:
                raise
            absent[method.name] = reason(error)
    for case in group.cases(shape, device, [DTYPES[name] for name in dtypes]):
        rows += run_case(group, calls, case, shape.rounds, device, absent)
        print(f"{group.title}: {case.labels}", flush=True)
    notes = {method.name: method.note.format(logits_chunk=LOGITS_CHUNK[device.type]) for method in group.methods}
    measured = {row["method"] for row in rows}
    sizes = {name: getattr(shape, name) for name in ("tokens", "vocab", "hidden", "rounds")}
    shown = {name: note for name, note in notes.items() if note and name in measured}
    print("".join(f"absent: {name} ({why})\n" for name, why in absent.items()), end="", flush=True)
    return {"title": group.title, **sizes, "notes": shown, "absent": absent}, rows


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else '-'}"


def run_case(
    group: Group, calls: dict[str, Callable], case: Case, rounds: int, device: torch.device, absent: dict[str, str]
) -> list[dict[str, Any]]:
    """A row for each method that does this case. Peers that fail move to `absent`."""
    found: dict[str, dict[str, Any]] = {}
    for method in group.methods:
        if method.name not in calls or (case.labels["entropy"] and not method.has_entropy):
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
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for _, name in itertools.product(range(rounds), found):
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
        self.gradients = list(torch.autograd.grad(self.outputs, inputs, self.cotangents))

    def both(self) -> None:
        self.forward()
        self.backward()


def examine(call: Callable[..., tuple[Tensor | None, ...]], case: Case, device: torch.device) -> dict[str, Any]:
    """Memory and accuracy of one run."""
    run = Run(call, case)
    peak = peak_bytes(device, run.both)
    outputs, gradients = [y.detach() for y in run.outputs], [gradient.detach() for gradient in run.gradients]
    return {"peak_mib": peak / 2**20, "peak_share": peak / case.logits_bytes, **case.errors(outputs, gradients)}


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
        chosen = [row for row in rows if row["group"] == "logits" and row["method"] == f"mgrpo, {method}"]
        return pick(row[figure] for row in chosen if entropy in (None, row["entropy"]))

    report = []
    if device.type == "cuda":
        for way in ("forward", "backward"):
            name, found = (
                f"in place, {way}: share of the copy bandwidth",
                worst("in place", None, f"{way}_copy_share", min),
            )
            report.append({"goal": name, "at_least": COPY_GOAL, "found": found, "met": found >= COPY_GOAL})
    else:
        wanted = {
            ("in place", False): 6.0,
            ("in place", True): 12.0,
            ("new buffer", False): 2.4,
            ("new buffer", True): 6.0,
        }
        for (method, entropy), least in wanted.items():
            found = worst(method, entropy, "speedup", min)
            name = f"{method}{', with entropy' * entropy}: times faster"
            report.append({"goal": name, "at_least": least, "found": found, "met": found >= least})
    share = worst("in place", None, "peak_share", max)
    memory = "in place: extra memory over the logits' bytes"
    return [*report, {"goal": memory, "below": 0.01, "found": share, "met": share < 0.01}]
