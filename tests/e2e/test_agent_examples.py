"""The examples of agents, as a user runs them: a few steps raise what their models are worth on problems that are new to them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launching import Run
from tests.namespaces import skip_without_namespaces

STEPS = 10
AGENTS_PYTHON = os.environ.get("MGRPO_TEST_AGENTS_PYTHON", "")


def lines(folder: Path, config: str, *flags: str) -> tuple[list[dict[str, Any]], Path]:
    """The metrics of a run of this example on one rank, and its folder."""
    alone = ["--tensor_model_parallel_size", "1", "--save_traces", "true"]
    run = Run(folder, [*alone, *flags], ranks=1, program=None, config=config)
    status, _ = run.end_of_all(1200)
    assert status == 0, run.text()[-3000:]
    return [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()], run.output_dir


def check(found: list[dict[str, Any]]) -> None:
    """At least 10 points more, trajectories with scores, and engine and trainer agree on all of their branches."""
    before, *_, after = (line["eval/scores"] for line in found if "eval/scores" in line)
    assert after > before + 0.1
    steps = [line for line in found if "reward" in line]
    assert len(steps) == STEPS
    for line in steps:
        assert line["val/no_score_rate"] < 0.05
        assert line["debug/vllm_vs_local_logprob_diff_max"] < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_coding_agent_learns_to_repair(tmp_path: Path) -> None:
    """Commands in walls of their own, judged by what they leave behind."""
    skip_without_namespaces()
    found, folder = lines(tmp_path, "coding_agent", "--total_episodes", str(STEPS * 128))
    check(found)
    paths = sorted((folder / "rollouts").glob("*_rollouts_*.jsonl"))
    traces = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    agents = [trace["trajectory"]["agent"] for trace in traces]
    assert agents and {(agent["ended"], agent["status"]) for agent in agents} == {("ended", 0)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not AGENTS_PYTHON, reason="MGRPO_TEST_AGENTS_PYTHON names no interpreter with openai-agents")
def test_an_agent_of_the_agents_sdk_learns(tmp_path: Path) -> None:
    """A framework that nobody has changed, in an environment of its own."""
    found, _ = lines(tmp_path, "agent", "--env_python", AGENTS_PYTHON, "--total_episodes", str(STEPS * 128))
    check(found)
