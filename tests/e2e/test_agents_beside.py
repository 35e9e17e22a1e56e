"""Agents in runs with adapters, teachers, servers, several endpoints, and an engine that dies in the middle of a turn.

Each is a short whole run of `several_agents`, whose trees, groups and tokens must be those of any other run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launching import ROOT, Run, survivors
from tests.e2e.test_agents import AGREES, COMPACTS, CRASHES, FORKS, MODEL, PROMPTS, SAMPLES, SILENT, check_exact
from tests.e2e.test_turns import traces
from tests.e2e.vllm_server import MISSING, REASON, TOKEN, Server
from tests.ports import free_port

pytest.importorskip("anthropic", reason="requirements/dev.txt has the client of Anthropic")

STEPS = 3
FLAGS = [
    *("--agent", "tests/e2e/several_agents.py:run", "--tensor_model_parallel_size", "1", "--save_traces", "true"),
    *("--num_unique_prompts_rollout", str(PROMPTS), "--num_samples_per_prompt_rollout", str(SAMPLES)),
    *("--total_episodes", str(STEPS * PROMPTS * SAMPLES), "--local_eval_every", "1000000"),
    *("--async_steps", "1", "--inflight_updates", "true", "--trajectory_timeout", "120"),
    *("--active_sampling", "false", "--filter_zero_std_samples", "false", "--weight_sync_check_every", "1"),
    *("--warm_up_steps", "0", "--lr_scheduler_type", "constant"),
    *("--dataset_mixer_eval_list", "examples/calculator/heldout.jsonl", "8"),
]
ADAPTERS = ["--use_peft", "true", "--lora_r", "8", "--lora_alpha", "16", "--learning_rate", "0.002"]
PROGRAM = "tests/e2e/recorded_asks.py"


def play(folder: Path, flags: Sequence[str], *, program: str = PROGRAM, **variables: str) -> tuple[Run, list[dict]]:
    """A run, whose tokens and groups are right, and its metrics by step."""
    asks = folder / "asks.jsonl"
    run = Run(folder, [*FLAGS, *flags], ranks=1, config="agent", program=(program, str(asks)), variables=variables)
    try:
        status, family = run.end_of_all(400)
        assert status == 0, run.text()[-4000:]
    finally:
        run.end()
    assert survivors(family, 20) == []
    num_turns = check_exact(run, [json.loads(line) for line in asks.read_text().splitlines()])
    assert num_turns > STEPS * PROMPTS * SAMPLES
    check_groups(run)
    lines = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    differences = [line[AGREES] for line in steps if AGREES in line]
    assert len(steps) == STEPS and differences and max(differences) < 1e-3
    return run, steps


def check_groups(run: Run) -> None:
    """Every prompt's agents are its own, each once; what has no score is not compared, and the others are with one another alone."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for trace in traces(run):
        groups[trace["step"], trace["prompt_id"]].append(trace)
    assert len(groups) == len({prompt for _, prompt in groups}) == STEPS * PROMPTS
    for group in groups.values():
        assert len(group) == SAMPLES
        endings = [trace["trajectory"]["agent"]["ended"] for trace in group]
        assert endings == ["silent" if n == SILENT else "crashed" if n == CRASHES else "ended" for n in range(SAMPLES)]
        assert len(group[FORKS]["branches"]) == 3 and len(group[COMPACTS]["branches"]) == 2
        scored = [trace for trace in group if trace["reward"] is not None]
        assert len(scored) == SAMPLES - 2
        mean = sum(trace["reward"] for trace in scored) / len(scored)
        for trace in scored:
            assert (trace["advantage"] > 1e-6) == (trace["reward"] > mean + 1e-6)
        assert abs(sum(trace["advantage"] for trace in scored)) < 1e-3


@pytest.mark.parametrize("lora_sync", ["merged", "adapter"])
def test_agents_train_adapters(tmp_path: Path, lora_sync: str) -> None:
    _, steps = play(tmp_path, [*ADAPTERS, "--lora_sync", lora_sync])
    assert steps[-1]["lora/update_ratio"] > steps[0]["lora/update_ratio"] > 0


@pytest.mark.slow
def test_agents_train_on_what_a_cut_has_left(tmp_path: Path) -> None:
    """Every sampled token comes with its set: over the whole vocabulary engine and trainer would not agree."""
    _, steps = play(tmp_path, ["--top_k", "8"])
    for step in steps:
        assert step["rollout/kept_unknown_share"] == 0 and step["rollout/kept_tokens_avg"] == 8


def test_a_teacher_judges_every_branch_after_its_own_context(tmp_path: Path) -> None:
    """It is the policy as it begins, so that at first both say the same of every token, unless one reads it after others."""
    teacher = ["--teacher_model_name_or_path", str(ROOT / MODEL), "--teacher_mode", "engine"]
    _, steps = play(tmp_path, [*teacher, "--distillation_coef", "0.1", "--distillation_loss", "sampled"])
    assert abs(steps[0]["distillation/kl"]) < 1e-4
    assert all(step.get("distillation/missing", 0) == 0 for step in steps)


@pytest.mark.skipif(bool(MISSING), reason=REASON)
def test_agents_are_served_by_a_server(tmp_path: Path) -> None:
    server = Server(ROOT / MODEL, tmp_path, max_model_len=512, has_tokenizer=True)
    try:
        server.wait()
        flags = ["--vllm_mode", "server", "--vllm_server_base_url", server.url]
        play(tmp_path, flags, MGRPO_VLLM_SERVER_TOKEN=TOKEN)
        assert server.says("/weight_info") == {"weight_version": str(STEPS)}
    finally:
        server.end()


def test_endpoints_of_a_run_and_one_that_joins_share_its_trajectories(tmp_path: Path) -> None:
    """Each agent is given the address of the endpoint that has its trajectory."""
    door = free_port()
    secret = "0123456789abcdef" * 4
    words = [sys.executable, "-m", "mgrpo", "agent-endpoint", "--join", f"127.0.0.1:{door}"]
    joins = subprocess.Popen(words, cwd=ROOT, env=os.environ | {"RAY_AUTH_TOKEN": secret})
    try:
        flags = ["--agent_endpoints", "2", "--agent_endpoint_join", f"127.0.0.1:{door}"]
        run, _ = play(tmp_path, flags, program="tests/e2e/three_endpoints.py", RAY_AUTH_TOKEN=secret)
        assert joins.wait(60) == 0
    finally:
        joins.kill()
        joins.wait()
    places = [trace["trajectory"]["metrics"].get("run/endpoint") for trace in traces(run)]
    assert set(places) == {0.0, 1.0, 2.0, None}, "those that crash have no metrics"


def test_turns_of_an_engine_that_is_killed_are_asked_again(tmp_path: Path) -> None:
    """Agents see nothing of it, and no turn is in a tree twice."""
    run, steps = play(tmp_path, [], program="tests/e2e/killed_turn.py")
    (again,) = re.findall(r"groups of engine 0 that begin again on others: (\d+)", run.text())
    assert int(again) > 0 and sum(step["engines/failed"] for step in steps) == 1
