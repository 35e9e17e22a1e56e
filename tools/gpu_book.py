"""The run book for one borrowed GPU: what a quarter hour on it answers, in the order of worth, in three kinds of calls.

    python tools/gpu_book.py start --carry .carry/1     # then, for each further folder but the last
    python tools/gpu_book.py more --carry .carry/2
    python tools/gpu_book.py finish --carry .carry/4
    python tools/gpu_book.py all --device cpu           # the three in a row, small: on any machine with all packages

`start` copies the tree and the pieces to --folder, unpacks what the learner needs and starts the learner's half of the book in the
background; `more` takes further pieces meanwhile; `finish` unpacks the rest, waits for the learner's half and runs the engine's.
Every call prints and writes to --out what is known so far: book.json, book.md, logs.txt. A stage is a process with a limit; one that
fails or is cut stops no other, and one that no longer fits into the budget is skipped. The exit code of finish is 1 if a stage
failed. docs/gpu.md has the order of calls, tools/gpu_carry.py makes the pieces.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_check
import torch
from gpu_carry import NEEDED
from gpu_check import Outcome, Place, outcome_of
from gpu_check_report import markdown, mode_table, share_table
from gpu_whole_run import Device, extension, gpu_tests, imports, modes, report_of, run_stages, write
from gpu_whole_run_site import ROOT, Site, environment, join
from gpu_whole_run_training import big, last_json, trl

BUDGET_S = 780.0
"""Seconds of the GPU for the whole book, with the machine's start."""
MACHINE_START_S = 90.0
"""Seconds from the first call until the machine runs it."""
UNPACK_S = 20.0
"""Seconds of `start` until the learner's half begins."""
JOIN_S = 90.0
"""Limit of unpacking, which runs beside the learner's half."""
WAIT_S = 45.0
"""Seconds for which `start` waits for first results."""
CPU_SLACK = 6.0
"""A CPU that others use may take so many times the seconds."""
TITLE = "The run book on one device"
PROTOCOL = (
    "Each stage is a process of its own, alone on the device; pieces are copied and unpacked beside the learner's half. Modes of "
    "training and learners by transformers: random weights, the same made-up samples, the fastest step after the first. Whole runs: "
    "random weights, rewards drawn at random, completions of the full length, medians over the steps after the first two. A 0.5 B run "
    "of mgrpo and TRL's do the same work."
)
CRASHED = "another_device"
"""The tests that have ended with a segmentation fault, by a part of their names."""
KERNEL = "grad_kernel"
COUNTERS = re.compile(
    r"^\s+(Duration|DRAM Throughput|Memory Throughput|Compute \(SM\) Throughput|Achieved Occupancy)\s+(\S+)\s+([\d.,]+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the book."""

    run: Callable[[Place, Site], Outcome]
    share_s: float
    """Seconds that are kept for it; it may also take what those before it have left over."""
    predicted: str = ""
    needs: str = ""
    """The stage that must have passed."""


def transformers_learner(place: Place, site: Site, *options: str) -> Outcome:
    """tools/gpu_book_learner.py on the model of the mode bf16."""
    program: list[str | Path] = [ROOT / "tools" / "gpu_book_learner.py", "--folder", site.folder / "modes/models/large"]
    size = ["--size", "large"] if place.device == "cuda" else []
    status, output = site.run([sys.executable, *program, "--device", place.device, *size, *options], place)
    if status != 0:
        return outcome_of(status, output)
    figures = last_json(output)
    if "skipped" in figures:
        return Outcome(status="skipped", note=figures["skipped"])
    memory = f", peak {figures['peak_gib']:.1f} GiB" if figures["peak_gib"] else ""
    note = f"{figures['tokens_per_s']:,.0f} tokens/s{memory}, log-probabilities by {figures['logprobs']}"
    return Outcome(status="passed", note=note, figures=figures)


def profile(place: Place, site: Site) -> Outcome:
    """The mode bf16 and a step of it under torch's profiler."""
    site.logs.mkdir(exist_ok=True)
    outcome = modes(place, site, ["bf16"], "large", ["--profile", site.logs / "kernels.txt"])
    if outcome.status == "passed":
        shares = outcome.figures["modes"][0]["profile"]["shares"]
        outcome.note = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in shares.items())
    return outcome


def ops(place: Place, site: Site) -> Outcome:
    """tools/bench.py ops: log-probabilities from logits and from hidden states in bfloat16, beside Liger and TRL."""
    sizes = {
        "cpu": ["--tokens", "32", "--vocab", "300", "--hidden", "16", "--repeats", "1"],
        "cuda": ["--repeats", "2"],
    }[place.device]
    out = site.folder / "ops" / "ops.json"
    chosen = ["--groups", "logits", "head", "--dtypes", "bfloat16", "--device", place.device, *sizes]
    status, output = site.run([sys.executable, ROOT / "tools" / "bench.py", "ops", "--output", out, *chosen], place)
    figures = json.loads(out.read_text()) if status == 0 else {}
    # Goals are for the sizes of a benchmark on a GPU.
    goals = figures.get("goals", []) if place.device == "cuda" else []
    missed = [f"not met: {goal['goal']}" for goal in goals if not goal["met"]]
    found = [
        f"{row['method']}{' with entropy' if row['entropy'] else ''} {row['speedup']:.3g} times as fast as plain torch"
        for row in figures.get("rows", [])
        if row["method"].startswith("mgrpo")
    ]
    note = "; ".join(missed + found)
    return outcome_of(status, output, note=note, **figures | {"goals": goals})


def counters(place: Place, site: Site) -> Outcome:
    """Nsight Compute's counters of one launch of the kernel for the gradient of log-probabilities."""
    beside = [str(Path(found).parent)] if (found := gpu_check.nvcc()) else []
    tool = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), *beside]))
    if place.device == "cpu" or tool is None:
        return Outcome(status="skipped", note="there is no GPU" if place.device == "cpu" else "ncu is not here")
    program = """
import torch, mgrpo.ops
for _ in range(2):
    logits = torch.randn(16384, 151936, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(151936, (16384,), device="cuda")
    mgrpo.ops.token_logprobs(logits * 1, targets, inplace=True)[0].sum().backward()
"""
    chosen = ["--kernel-name", KERNEL, "--launch-skip", "1", "--launch-count", "1", "--set", "detailed"]
    status, output = site.run([tool, *chosen, sys.executable, "-c", program], place)
    values = {name: f"{number} {unit}" for name, unit, number in COUNTERS.findall(output)}
    if status == 0 and not values:
        return Outcome(status="failed", note="ncu has no counters", output=output[-gpu_check.TAIL :])
    return outcome_of(
        status, output, note=", ".join(f"{name} {text}" for name, text in values.items()), counters=values
    )


FAMILIES = (
    *("gpt-oss fp32", "gpt-oss", "DeepSeek-V3 fp32", "DeepSeek-V3", "Qwen3-Next fp32", "Qwen3-Next"),
    *("Qwen3-Next without fla", "GLM-4.5 fp32", "GLM-4.5"),
)
LEARNER: dict[str, Stage] = {
    "extension": Stage(extension, 60),
    "modes": Stage(
        partial(modes, names=("bf16", "bf16", "zero_stage 3", "shared prompts"), size="large"),
        60,
        "MFU 39 % warm; shared prompts 10 % faster",
    ),
    "fused_layers": Stage(
        partial(modes, names=("fused_layers off", "fused_layers"), size="large"), 25, "5 to 10 % fewer seconds"
    ),
    "profile": Stage(profile, 20, "head 30 %, Adam 10 %, elementwise 20 %"),
    "transformers": Stage(transformers_learner, 20, "mgrpo 1.3 to 1.8 times as fast"),
    "transformers_liger": Stage(lambda place, site: transformers_learner(place, site, "--liger"), 20),
    "transformers_compiled": Stage(
        lambda place, site: transformers_learner(place, site, "--liger", "--compile"), 35, "as fast as mgrpo"
    ),
    "families": Stage(partial(modes, names=FAMILIES), 60, "one of four fails"),
    "offloading": Stage(partial(modes, names=("activation_offloading",), size="large"), 15),
    "crashed_test": Stage(
        partial(gpu_tests, folder="ops", options=("-k", CRASHED)),
        10,
        "the crash is an operand of the loss on the CPU",
    ),
    "ops_tests": Stage(partial(gpu_tests, folder="ops", options=("-k", f"not {CRASHED}")), 10),
    "parallel_tests": Stage(partial(gpu_tests, folder="parallel"), 15),
    "policy_tests": Stage(partial(gpu_tests, folder="policy"), 10),
    "ops": Stage(
        ops, 25, "logits 6 times as fast as others unfused; head 10 % slower than Liger's, faster with entropy"
    ),
}
"""The learner's half, without vLLM, in the order of worth."""
ENGINE: dict[str, Stage] = {
    "imports": Stage(imports, 20),
    "big": Stage(
        partial(big, name="big"), 100, "engine starts in 45 s; a step 4 to 5 s; sync of 1 GB 0.05 s", needs="imports"
    ),
    "trl": Stage(trl, 85, "its start may fail with vLLM 0.32; else a step takes 1.3 to 1.8 times as long"),
    "big_1.5b": Stage(
        partial(big, name="big_1.5b"), 65, "fits; sync of 3 GB 0.15 s; MFU above that of 0.5 B", needs="imports"
    ),
    "counters": Stage(counters, 15, "memory is the only unit above 80 %"),
}
"""The engine's half, alone on the GPU."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two figures of the book beside each other, each as stage, mode of training or "", and name."""

    what: str
    first: tuple[str, str, str]
    second: tuple[str, str, str]
    is_rate: bool = True
    """The larger figure is the faster."""


WARM = ("modes", "bf16 (2)", "tokens_per_s")
COMPARISONS = (
    Comparison("learner, tokens/s: mgrpo, transformers", WARM, ("transformers", "", "tokens_per_s")),
    Comparison("learner, tokens/s: mgrpo, transformers with Liger", WARM, ("transformers_liger", "", "tokens_per_s")),
    Comparison("learner, tokens/s: mgrpo, the same compiled", WARM, ("transformers_compiled", "", "tokens_per_s")),
    Comparison(
        "s: shared prompts, bf16", ("modes", "shared prompts", "seconds"), ("modes", "bf16 (2)", "seconds"), False
    ),
    Comparison(
        "tokens/s: fused layers, without",
        ("fused_layers", "fused_layers", "tokens_per_s"),
        ("fused_layers", "fused_layers off", "tokens_per_s"),
    ),
    Comparison(
        "tokens/s: Qwen3-Next, without fla",
        ("families", "Qwen3-Next", "tokens_per_s"),
        ("families", "Qwen3-Next without fla", "tokens_per_s"),
    ),
    Comparison("whole step, s: mgrpo, TRL", ("big", "", "total_s"), ("trl", "", "step_s"), False),
)


def run_half(stages: Mapping[str, Stage], device: Device, site: Site, deadline: float) -> None:
    """Run the stages one after the other until `deadline`, by `time.time()`; skip those whose share is no longer left."""
    names = list(stages)
    for number, (name, stage) in enumerate(stages.items()):
        left, share = deadline - time.time(), stage.share_s * slack(device)
        later = sum(stages[other].share_s for other in names[number + 1 :]) * slack(device)
        print(f"{name} ...", flush=True)
        if stage.needs and status_of(site, stage.needs) != "passed":
            skip(site, name, f"{stage.needs} has not passed")
        elif left < share:
            skip(site, name, f"it may take {share:.0f} s, {max(0.0, left):.0f} s of the budget are left")
        else:
            limit_s = max(share, left - later)
            for _ in run_stages({name: (stage.run, limit_s)}, device, site, time.monotonic() + left):
                pass


def slack(device: Device) -> float:
    """Factor of every limit."""
    return CPU_SLACK if device == "cpu" else 1.0


def status_of(site: Site, name: str) -> str:
    """Status of a stage; "" before it has ended."""
    file = site.parts / f"{name}.json"
    return json.loads(file.read_text())["status"] if file.exists() else ""


def skip(site: Site, name: str, why: str) -> None:
    """Note that a stage was skipped."""
    site.keep(name, json.dumps(asdict(Outcome(status="skipped", note=why)), indent=1) + "\n")
    print(f"{name} skipped: {why}", flush=True)


def deadlines(site: Site, device: Device) -> tuple[float, float]:
    """The ends of the learner's half and of the book, by `time.time()`."""
    end = begin_file(site).stat().st_mtime + (BUDGET_S - MACHINE_START_S) * slack(device)
    return end - sum(stage.share_s for stage in ENGINE.values()) * slack(device), end


def begin_file(site: Site) -> Path:
    """The file whose time is that of `start`."""
    return site.folder / "begun"


def tree_of(site: Site) -> Path:
    return site.folder / "tree"


def copy_tree(folder: Path) -> None:
    """Copy what a run on a GPU needs of the repository: the next call gets a new copy, without what was built."""
    for pattern in NEEDED:
        for path in ROOT.glob(pattern):
            place = folder / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(path, place)


def take_pieces(carried: Path | None, site: Site) -> None:
    """Copy the pieces that this call has carried."""
    if carried is None:
        return
    pieces = site.folder / "pieces"
    pieces.mkdir(exist_ok=True)
    for piece in carried.iterdir():
        shutil.copy2(piece, pieces)


def unpack(device: Device, site: Site, deadline: float) -> None:
    """Unpack the archives that are complete."""
    if not (site.folder / "pieces").exists():
        skip(site, "join", "nothing was carried: the packages are installed")
        return
    limit_s = min(JOIN_S * slack(device), deadline - time.time())
    for _ in run_stages({"join": (join, limit_s)}, device, site, time.monotonic() + limit_s):
        pass


def start(args: argparse.Namespace, site: Site) -> None:
    """Unpack what is there and start the learner's half, detached; it holds a lock as long as it lives."""
    unpack(args.device, site, deadlines(site, args.device)[0])
    command = [
        sys.executable,
        ROOT / "tools" / "gpu_book.py",
        "learner",
        "--device",
        args.device,
        "--folder",
        site.folder,
    ]
    with lock_file(site).open("w") as lock, learner_log(site).open("w") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=[lock.fileno()]
        )


def lock_file(site: Site) -> Path:
    return site.folder / "learner.lock"


def learner_log(site: Site) -> Path:
    return site.folder / "learner.txt"


def is_learner_running(site: Site) -> bool:
    with lock_file(site).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_for_learner(site: Site, until: float) -> None:
    """Wait for the end of the learner's half, at most until then, by `time.time()`."""
    while is_learner_running(site) and time.time() < until:
        time.sleep(gpu_check.POLL_S)


def finish(args: argparse.Namespace, site: Site) -> None:
    """Unpack the rest, wait for the learner's half, and run the engine's."""
    learner_end, end = deadlines(site, args.device)
    unpack(args.device, site, end)
    wait_for_learner(site, learner_end)
    run_half(ENGINE, args.device, site, end)


def tell(args: argparse.Namespace, site: Site) -> dict[str, Any]:
    """Print and write what is known so far."""
    report = report_of(site, args.device, PROTOCOL)
    report["learner_is_running"] = is_learner_running(site)
    report["predictions"] = {name: stage.predicted for name, stage in (LEARNER | ENGINE).items() if stage.predicted}
    write(report, page(report), site, args.out, name="book")
    for name, part in report["parts"].items():
        print(f"{name}: {part['status']}, {part['seconds']:.0f} s, {part['note']}")
    left = deadlines(site, args.device)[1] - time.time()
    print(f"the learner's half {'is running' if report['learner_is_running'] else 'has ended'}; {left:.0f} s are left")
    log = learner_log(site)
    print(*(log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else ()), flush=True)
    return report


def page(report: dict[str, Any]) -> str:
    """The report as a page: stages, predictions beside what came, figures beside each other, tables of modes and ops."""
    parts = report["parts"]
    lines = [markdown(report, title=TITLE), "## Predictions", "", "| stage | predicted | came |", "|---|---|---|"]
    for name, predicted in report["predictions"].items():
        part = parts.get(name, {"status": "not run", "note": ""})
        lines.append(f"| {name} | {predicted} | {part['status']}: {cell(part['note'])} |")
    lines += ["", "## Beside each other", "", "| | first | second | times as fast |", "|---|---:|---:|---:|"]
    for comparison in COMPARISONS:
        first, second = (figure_of(parts, *which) for which in (comparison.first, comparison.second))
        if first and second:
            times = first / second if comparison.is_rate else second / first
            lines.append(f"| {comparison.what} | {first:,.5g} | {second:,.5g} | {times:.2f} |")
    for name, part in parts.items():
        if found := part["figures"].get("modes"):
            lines += ["", f"## {name}", "", *mode_table(found), *share_table(found)]
    return "\n".join([*lines, *ops_table(parts.get("ops", {}).get("figures", {}).get("rows", []))]) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def figure_of(parts: Mapping[str, Any], stage: str, mode: str, name: str) -> float | None:
    """A figure of a stage or of one of its modes; None where that has not passed."""
    figures = parts.get(stage, {}).get("figures", {})
    if mode:
        figures = next((found for found in figures.get("modes", []) if found["mode"] == mode), {})
    return figures.get(name)


def ops_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each method of the ops."""
    if not rows:
        return []
    headings = ["group", "entropy", "method", "forward ms", "backward ms", "times as fast", "peak MiB"]
    lines = ["", "## Ops in bfloat16", "", f"| {' | '.join(headings)} |", "|---|---|---|" + "---:|" * 4]
    for row in rows:
        times = " | ".join(f"{row[name]:.4g}" for name in ("forward_ms", "backward_ms", "speedup", "peak_mib"))
        lines.append(f"| {row['group']} | {'yes' if row['entropy'] else 'no'} | {row['method']} | {times} |")
    return lines


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "call", choices=["start", "more", "finish", "all", "learner"], help="learner: the process that start leaves"
    )
    parser.add_argument("--carry", type=Path, help="folder of the pieces that this call has carried")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "gpu-book",
        help="what is kept between calls (%(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path("output/gpu-book"), help="folder for the report (%(default)s)")
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, help="seconds for which start waits for results (%(default)s)"
    )
    args = parser.parse_args()
    args.folder, args.out = args.folder.resolve(), args.out.absolute()
    return args


def main() -> None:
    args = parse_args()
    site = Site(args.folder, ())
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--device cuda: torch {torch.__version__} sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    if tree_of(site) != ROOT:
        begins = args.call in ("start", "all")
        if begins == begin_file(site).exists():
            sys.exit(
                f"--folder {site.folder} holds a book that has begun; call more or finish, or remove it"
                if begins
                else f"--folder {site.folder} holds no book; call start first"
            )
        if begins:
            site.folder.mkdir(parents=True, exist_ok=True)
            begin_file(site).touch()
            copy_tree(tree_of(site))
        take_pieces(args.carry, site)
        program = tree_of(site) / "tools" / "gpu_book.py"
        os.execv(sys.executable, [sys.executable, str(program), *absolute(args)])
    os.environ |= environment(site, args.device)
    if args.call == "learner":
        run_half(LEARNER, args.device, site, deadlines(site, args.device)[0])
        return
    if args.call in ("start", "all"):
        start(args, site)
    if args.call == "start":
        wait_for_learner(site, time.time() + args.wait)
    if args.call in ("finish", "all"):
        finish(args, site)
    report = tell(args, site)
    if args.call in ("finish", "all"):
        sys.exit(any(part["status"] == "failed" for part in report["parts"].values()))


def absolute(args: argparse.Namespace) -> list[str]:
    """The arguments of the same call from the tree that is kept."""
    return [
        args.call,
        "--device",
        args.device,
        "--folder",
        str(args.folder),
        "--out",
        str(args.out),
        "--wait",
        str(args.wait),
    ]


if __name__ == "__main__":
    main()
