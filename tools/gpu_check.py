"""Proves on this machine's GPU, in ten minutes, that mgrpo's CUDA parts work, and how fast they are.

    python tools/gpu_check.py [--device cpu|cuda] [--quick] [--parts NAME ...] [--out FOLDER]

Needs torch, megatron-core and what they need, and pytest; no network, no vLLM, no Ray. Each part is a process, which may take
the time that the parts before have left over, so that none hides another. Writes gpu-check-<device>.json and .md; the exit code is 1 if a part failed. On a CPU the same
parts run at a small size, as far as they can. What the parts are: PARTS below.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from gpu_check_report import markdown, mode_problems, numbered

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
PACKAGES = ("torch", "megatron-core", "triton", "transformer-engine", "apex", "numpy", "transformers")
LIMIT_S = 600
SHARES_S = {"extension": 200, "native": 60, "gpu_tests": 120, "ops": 50, "training": 130, "sanitizer": 40}
"""Seconds that each part has at least, with a build of the extension; all of them where it runs alone."""
MODE_LIMIT_S = 120
POLL_S = 0.1
TAIL = 4000
"""Characters that are kept of what a part that failed has printed."""
PROTOCOL = (
    "Each part is a process of its own. Training: random weights, made-up samples, the learner of a run without engines; the "
    "fastest step after the first counts; memory is the peak that torch's allocator handed out. Ops: see benchmarks/README.md."
)


@dataclass(frozen=True, slots=True)
class Place:
    """The device to check, and the means."""

    device: Literal["cpu", "cuda"]
    is_quick: bool
    scratch: Path
    deadline: float
    """Deadline of the part, by `time.monotonic()`."""

    @property
    def remaining_s(self) -> float:
        """Seconds left to the part."""
        return self.deadline - time.monotonic()

    @property
    def capability(self) -> str:
        """Compute capability of the GPU, as in "9.0"."""
        return ".".join(map(str, torch.cuda.get_device_capability()))


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of a part."""

    status: Literal["passed", "failed", "skipped"]
    note: str = ""
    """Why it failed or was skipped; what it found."""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    """The end of what it printed, where it failed."""


def run(
    command: Sequence[str | Path],
    place: Place,
    *,
    limit_s: float = math.inf,
    written: Path | None = None,
    **environment: str,
) -> tuple[int | None, str]:
    """Exit status and output of a process; None where it was ended with all its children because its time was over.

    Args:
        limit_s: from the start, or from the last time that the process wrote to the file `written`.
    """
    here = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if place.device == "cpu" else {}) | environment
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=here, stdout=output, stderr=output, start_new_session=True
        )
        start = time.time()
        try:
            while (status := process.poll()) is None and place.remaining_s > 0:
                since = max(start, written.stat().st_mtime) if written and written.exists() else start
                if time.time() - since > limit_s:
                    break
                time.sleep(POLL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def outcome_of(status: int | None, output: str, note: str = "", **figures: Any) -> Outcome:
    """Passed if the process ended with 0."""
    if status == 0:
        return Outcome(status="passed", note=note, figures=figures)
    why = f"its time was over; alone, with --parts, it has {LIMIT_S} s" if status is None else f"exit code {status}"
    return Outcome(status="failed", note=why, figures=figures, output=output[-TAIL:])


def nvcc() -> str | None:
    """On PATH, in pip's toolkit, or in the usual place."""
    folders = [Path(torch.__file__).parent.parent / "nvidia" / f"cu{str(torch.version.cuda).partition('.')[0]}" / "bin"]
    return shutil.which("nvcc") or shutil.which(
        "nvcc", path=os.pathsep.join([*map(str, folders), "/usr/local/cuda/bin"])
    )


def extension(place: Place) -> Outcome:
    """The compiled ops are there, built from this source; on a GPU they are built now if they are not."""
    tell = [sys.executable, "-c", "import json, mgrpo.ops; print(json.dumps(mgrpo.ops.build_info()))"]
    status, output = run(tell, place)
    if status == 0 and place.device == "cuda" and not json.loads(output.splitlines()[-1])["cuda_archs"]:
        build = [sys.executable, "setup.py", "build_ext", "--inplace"]
        status, output = run(build, place, MGRPO_CUDA="1", TORCH_CUDA_ARCH_LIST=place.capability)
        if status == 0:
            status, output = run(tell, place)
    if status != 0:
        return outcome_of(status, output)
    info = json.loads(output.splitlines()[-1])
    if info["error"] or (place.device == "cuda" and not info["cuda_archs"]):
        return Outcome(status="failed", note=info["error"] or "it was built without CUDA kernels")
    return Outcome(status="passed", note=info["cuda_archs"] or "CPU kernels", figures=info)


def native(place: Place) -> Outcome:
    """CMake builds the kernels without torch, and their own tests compare them with double precision."""
    if shutil.which("cmake") is None:
        return Outcome(status="skipped", note="cmake is not installed")
    options, libraries = ["-DMGRPO_CUDA=OFF"], {}
    if place.device == "cuda":
        options, libraries = toolkit_options(place)
    folder, output = native_folder(place), ""
    for command in (
        ["cmake", "-S", ROOT, "-B", folder, *options],
        ["cmake", "--build", folder, "--parallel"],
        ["ctest", "--test-dir", folder, "--output-on-failure"],
    ):
        status, output = run(command, place, **libraries)
        if status != 0:
            return outcome_of(status, output)
    if place.device == "cuda" and ("logprob_cuda" not in output or "Skipped" in output):
        return Outcome(status="failed", note="the CUDA tests did not run", output=output[-TAIL:])
    return Outcome(status="passed", note=next(iter(re.findall(r"\d+% tests passed.*", output)), ""))


def toolkit_options(place: Place) -> tuple[list[str], dict[str, str]]:
    """Options of CMake, and variables of its environment: pip's toolkit does not lie as CMake and nvcc expect."""
    options = [f"-DCMAKE_CUDA_ARCHITECTURES={place.capability.replace('.', '')}"]
    found = nvcc()
    if found is None:
        return options, {}
    libraries = Path(found).resolve().parents[1] / "lib"
    options.append(f"-DCMAKE_CUDA_COMPILER={found}")
    runtime = sorted(libraries.glob("libcudart.so.*"))
    if not runtime or (libraries / "libcudart.so").exists():
        return options, {}
    return [*options, f"-DCUDA_CUDART={runtime[0]}", f"-DCMAKE_LIBRARY_PATH={libraries}"], {
        "LIBRARY_PATH": str(libraries)
    }


def native_folder(place: Place) -> Path:
    return place.scratch / "native"


def sanitizer(place: Place) -> Outcome:
    """compute-sanitizer finds no access outside of a buffer in the native tests."""
    beside = [str(Path(found).parent)] if (found := nvcc()) else []
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *beside]))
    tests = sorted(native_folder(place).glob("test_*_cuda"))
    if place.device == "cpu" or tool is None or not tests:
        missing = (
            "there is no GPU" if place.device == "cpu" else "compute-sanitizer" if tool is None else "no native tests"
        )
        return Outcome(status="skipped", note=missing if place.device == "cpu" else f"{missing}: not here")
    for test in tests:
        status, output = run([tool, "--tool", "memcheck", "--error-exitcode", "1", test], place)
        if status != 0:
            failed = outcome_of(status, output)
            return Outcome(status="failed", note=f"{test.name}: {failed.note}", output=failed.output)
    return Outcome(status="passed", note=", ".join(test.name for test in tests))


def gpu_tests(place: Place) -> Outcome:
    """The tests with the mark `gpu`."""
    if place.device == "cpu":
        return Outcome(status="skipped", note="there is no GPU")
    if find_spec("pytest") is None:
        return Outcome(status="failed", note="pytest is not installed; `make dev` installs it")
    # -vv: what it prints ends with the test that was running when its time was over.
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-vv", "-rs", "--no-header", *files_with_gpu_tests()]
    status, output = run(command, place)
    return outcome_of(status, output, note=output.strip().splitlines()[-1] if output.strip() else "")


def files_with_gpu_tests() -> list[Path]:
    """The others need packages that only their own tests use."""
    return [file for file in sorted((ROOT / "tests" / "unit").rglob("test_*.py")) if "mark.gpu" in file.read_text()]


def ops(place: Place) -> Outcome:
    """tools/bench.py ops: time, memory and accuracy of the ops, and kernels against the rate of a plain copy."""
    sizes = {
        ("cpu", True): ["--tokens", "32", "--vocab", "300", "--hidden", "16", "--repeats", "1"],
        ("cpu", False): ["--tokens", "256", "--vocab", "4000", "--hidden", "64", "--repeats", "2"],
        ("cuda", True): ["--repeats", "3"],
        ("cuda", False): [],
    }[place.device, place.is_quick]
    report = place.scratch / f"ops-{place.device}.json"
    command = [sys.executable, TOOLS / "bench.py", "ops", "--device", place.device, "--output", report, *sizes]
    status, output = run(command, place)
    figures = json.loads(report.read_text()) if status == 0 else {}
    # Goals are for the sizes of a benchmark on a GPU.
    goals = figures.get("goals", []) if place.device == "cuda" else []
    missed = [goal["goal"] for goal in goals if not goal["met"]]
    note = f"goals not met: {'; '.join(missed)}" if missed else "all goals met" if goals else ""
    return outcome_of(status, output, note=note, **figures | {"goals": goals})


def training(place: Place) -> Outcome:
    """tools/gpu_check_training.py: every mode that one GPU has, compared with float32 and with the plan."""
    command = [sys.executable, TOOLS / "gpu_check_training.py", "--device", place.device]
    command += ["--folder", place.scratch / "models"]
    names = run([*command, "--list"], place)[1].splitlines()
    modes = train_modes(command, names, place)
    problems = mode_problems(modes)
    passed = sum(mode["status"] == "passed" for mode in modes)
    return Outcome(
        status="failed" if problems else "passed",
        note=f"{passed} of {len(modes)} modes ran" + "".join(f"; {problem}" for problem in problems),
        figures={"modes": modes},
        output="".join(f"--- {mode['mode']}\n{mode['output']}\n" for mode in modes if mode.get("output"))[-3 * TAIL :],
    )


def train_modes(
    command: Sequence[str | Path], names: Sequence[str], place: Place, *, mode_limit_s: float = MODE_LIMIT_S
) -> list[dict[str, Any]]:
    """A record for each mode. Where the process dies or hangs in one, another goes on with the next."""
    names = [*numbered(names)]
    records: list[dict[str, Any]] = []
    lines = place.scratch / "modes.jsonl"
    while len(records) < len(names):
        lines.unlink(missing_ok=True)
        waiting = names[len(records) :]
        if place.remaining_s <= 0:
            return records + [{"mode": name, "status": "failed", "error": "there was no time left"} for name in waiting]
        status, output = run([*command, "--out", lines, *waiting], place, limit_s=mode_limit_s, written=lines)
        written = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        done = [record for record in written if "status" in record]
        if len(done) < len(waiting) and (not done or done[-1]["status"] == "passed"):
            why = "its time was over" if status is None else f"its process ended with {status}"
            done.append({"mode": waiting[len(done)], "status": "failed", "error": why})
        if done[-1]["status"] == "failed":
            done[-1]["output"] = output[-TAIL:]
        records += done
    return records


PARTS: dict[str, Callable[[Place], Outcome]] = {
    "extension": extension,
    "native": native,
    "gpu_tests": gpu_tests,
    "ops": ops,
    "training": training,
    "sanitizer": sanitizer,
}


def limits(parts: Sequence[str]) -> dict[str, float]:
    """When each part must have ended, in seconds from the start: the parts behind it keep their shares."""
    return {name: LIMIT_S - sum(SHARES_S[later] for later in parts[number + 1 :]) for number, name in enumerate(parts)}


def check(part: Callable[[Place], Outcome], place: Place) -> Outcome:
    """A part's outcome, also where the check itself fails."""
    start = time.monotonic()
    try:
        outcome = part(place) if place.remaining_s > 0 else Outcome(status="failed", note="there was no time left")
    except Exception as error:  # the report must show the other parts
        outcome = Outcome(status="failed", note=f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - start
    return outcome


def machine(device: str) -> dict[str, Any]:
    """Where the check ran."""
    about: dict[str, Any] = {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        with contextlib.suppress(OSError):
            about["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        properties = torch.cuda.get_device_properties(0)
        about |= {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return about


def versions() -> dict[str, str]:
    """Versions of the packages that matter, where installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="smaller sizes of the ops")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("output/gpu-check"), help="folder for the report")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"--device cuda: torch {torch.__version__} sees no GPU; check nvidia-smi, CUDA_VISIBLE_DEVICES and that torch is a "
            "CUDA build"
        )
    with tempfile.TemporaryDirectory(prefix="mgrpo-gpu-check-") as scratch:
        start = time.monotonic()
        place = Place(args.device, args.quick, Path(scratch), start + LIMIT_S)
        outcomes = {}
        for name, limit_s in limits(args.parts).items():
            print(f"{name} ...", end=" ", flush=True)
            outcomes[name] = outcome = check(PARTS[name], replace(place, deadline=start + limit_s))
            print(
                f"{outcome.status} after {outcome.seconds:.0f} s{f': {outcome.note}' if outcome.note else ''}",
                flush=True,
            )
    report = {
        "device": args.device,
        "machine": machine(args.device),
        "versions": versions(),
        "protocol": PROTOCOL,
        "parts": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gpu-check-{args.device}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    print(f"written to {path} and {path.with_suffix('.md')}")
    sys.exit(any(outcome.status == "failed" for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
