"""A run whose agents are played elsewhere, by workers of which one is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgrpo.environments.launch.agent_worker import KEY
from tests.e2e.launching import ROOT, Run, survivors
from tests.e2e.test_agents import check_exact
from tests.e2e.test_turns import traces
from tests.ports import free_port

STEPS, PROMPTS, SAMPLES = 2, 2, 4
FLAGS = [
    *("--agent", "remote", "--tensor_model_parallel_size", "1", "--save_traces", "true", "--eval_pass_at_k", "1"),
    *("--num_unique_prompts_rollout", str(PROMPTS), "--num_samples_per_prompt_rollout", str(SAMPLES)),
    *("--total_episodes", str(STEPS * PROMPTS * SAMPLES), "--local_eval_every", "1000000"),
    *("--dataset_mixer_eval_list", "examples/calculator/heldout.jsonl", "2"),
    *("--active_sampling", "false", "--filter_zero_std_samples", "false", "--agent_endpoint_port"),
]
LONG_S = 300.0


@pytest.mark.slow
def test_the_task_of_a_worker_that_is_killed_is_played_by_another(tmp_path: Path) -> None:
    """Within about a minute, and not when its trajectory is late; every group is whole, and nothing of the first one's is trained."""
    port, mark, asks = free_port(), tmp_path / "begun", tmp_path / "asks.jsonl"
    key = {KEY: "a key of the run"}

    def worker() -> subprocess.Popen:
        words = ["agent-worker", "--url", f"http://127.0.0.1:{port}", "--agent_box", "none", "--at_once", "2"]
        agent = f"{sys.executable} {ROOT / 'tests/e2e/blocking_agent.py'} {mark}"
        return subprocess.Popen(
            [sys.executable, "-m", "mgrpo", *words, "--agent", agent], cwd=ROOT, env=os.environ | key
        )

    run = Run(
        tmp_path,
        [*FLAGS, str(port)],
        ranks=1,
        config="agent",
        program=("tests/e2e/recorded_asks.py", str(asks)),
        variables=key,
    )
    workers = [worker()]
    try:
        end = time.monotonic() + LONG_S
        while not mark.exists():
            assert run.process.poll() is None and time.monotonic() < end, run.text()[-3000:]
            time.sleep(0.1)
        workers[0].kill()
        workers.append(worker())
        status, family = run.end_of_all(LONG_S)
        assert status == 0, run.text()[-4000:]
    finally:
        run.end()
        for process in workers:
            process.kill()
            process.wait()
    assert survivors(family, 20) == []
    found = traces(run)
    assert len(found) == STEPS * PROMPTS * SAMPLES
    assert all(trace["trajectory"]["agent"]["ended"] == "ended" for trace in found)
    assert all(len(trace["trajectory"]["turns"]) == 2 and trace["reward"] is not None for trace in found)
    assert check_exact(run, [json.loads(line) for line in asks.read_text().splitlines()]) == 2 * len(found)
    lines = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    gone = [line.get("agents/workers_gone", 0.0) + line.get("eval/agents/workers_gone", 0.0) for line in lines]
    assert sum(gone) > 0
