"""Agents with the real clients of OpenAI and Anthropic, in processes of their own, against a real engine while it is trained.

Every trajectory asks in a way of its own, see `several_agents`.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.launching import Run, survivors
from tests.e2e.test_turns import traces

pytest.importorskip("anthropic", reason="requirements/dev.txt has the client of Anthropic")

STEPS, PROMPTS, SAMPLES = 4, 4, 8
MODEL = "examples/calculator/model"
FLAGS = [
    *(
        "--agent",
        "tests/e2e/several_agents.py:run",
        "--tensor_model_parallel_size",
        "1",
        "--local_eval_every",
        "1000000",
    ),
    *("--num_unique_prompts_rollout", str(PROMPTS), "--total_episodes", str(STEPS * PROMPTS * SAMPLES)),
    *("--async_steps", "1", "--inflight_updates", "true", "--save_traces", "true", "--trajectory_timeout", "60"),
    # Also those without a score, and groups whose rewards are equal.
    *("--active_sampling", "false", "--filter_zero_std_samples", "false", "--checkpoint_state_freq", "1"),
]
AGREES = "debug/vllm_vs_local_logprob_diff_max"
PLAIN, STREAMED, ANTHROPIC, FORKS, COMPACTS, GIVES_UP, SILENT, CRASHES = range(SAMPLES)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    asks = folder / "asks.jsonl"
    run = Run(folder, FLAGS, ranks=1, config="agent", program=("tests/e2e/recorded_asks.py", str(asks)))
    try:
        status, family = run.end_of_all(300)
        assert status == 0, run.text()[-4000:]
    finally:
        run.end()
    assert survivors(family, 20) == []
    return run, [json.loads(line) for line in asks.read_text().splitlines()]


def trajectories(run: Run) -> list[list[dict[str, Any]]]:
    """By sample, those that a run has trained on."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(SAMPLES)]
    counts: dict[tuple[int, str], int] = {}
    for trace in traces(run):
        key = (trace["step"], trace["prompt_id"])
        counts[key] = counts.get(key, 0) + 1
        found[counts[key] - 1].append(trace)
    return found


def branches(trace: dict[str, Any]) -> list[tuple[list[int], slice]]:
    """The context of each branch, and the place of its tokens."""
    own = [(each["prompt_tokens"], slice(each["start"], each["end"])) for each in trace.get("branches", ())]
    return own or [(trace["prompt_tokens"], slice(0, len(trace["response_tokens"])))]


def test_every_trained_token_is_one_that_the_engine_sampled_after_exactly_the_tokens_before_it(played) -> None:
    """Ids and log-probabilities of each turn in the traces are an engine's own, bit for bit, after the same tokens."""
    assert check_exact(*played) > STEPS * PROMPTS * SAMPLES


def check_exact(run: Run, asks: list[dict[str, Any]]) -> int:
    """The number of turns that were trained, each of which was sampled after exactly the tokens before it, and is trained once."""
    known: dict[tuple[int, ...], list[list[float]]] = {}
    for ask in asks:
        values = [round(value, 7) for value in ask["logprobs"]]
        known.setdefault((*ask["before"], -1, *ask["sampled"]), []).append(values)
    num_turns = 0
    for trace in traces(run):
        covered = np.zeros(len(trace["response_tokens"]), bool)
        for context, own in branches(trace):
            tokens, mask = trace["response_tokens"][own], np.array(trace["response_mask"][own])
            starts = np.flatnonzero(np.diff(np.concatenate(([0], mask))) == 1)
            ends = np.flatnonzero(np.diff(np.concatenate((mask, [0]))) == -1) + 1
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                turn = (*context, *tokens[:start], -1, *tokens[start:end])
                known[turn].remove(trace["logprobs"][own][start:end])
                num_turns += 1
            covered[own] = True
        assert covered.all()
        assert num_turns
    return num_turns


def test_each_way_of_asking_has_its_own_tree(played) -> None:
    run, _ = played
    found = trajectories(run)
    for trace in (*found[PLAIN], *found[STREAMED], *found[ANTHROPIC]):
        assert len(branches(trace)) == 1
    for trace in found[FORKS]:
        roots = [each["parent"] for each in trace["trajectory"]["branches"]].count(None)
        # One answer, two questions about it, and another system prompt.
        assert (len(trace["branches"]), roots) == (3, 2)
    assert all(len(trace["branches"]) == 2 for trace in found[COMPACTS])
    for trace in (*found[SILENT], *found[CRASHES]):
        assert not any(trace["response_mask"]) or trace["reward"] is None
    endings = [{trace["trajectory"]["agent"]["ended"] for trace in traces_of} for traces_of in found]
    assert endings[PLAIN] == {"ended"} and endings[SILENT] == {"silent"} and endings[CRASHES] == {"crashed"}
    assert all(trace["trajectory"]["agent"]["counts"]["overridden/temperature"] >= 1 for trace in found[GIVES_UP])


def test_log_probabilities_are_those_of_transformers_on_every_branch(played) -> None:
    run, _ = played
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    first = [trace for trace in traces(run) if set(trace["policy_versions"]) <= {-1, 0}]
    assert len(first) >= PROMPTS * SAMPLES // 2
    for trace in first:
        for context, own in branches(trace):
            tokens = trace["response_tokens"][own]
            if not tokens:
                continue
            with torch.no_grad():
                logits = model(torch.tensor([[*context, *tokens]])).logits[0, len(context) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
            mask = np.array(trace["response_mask"][own], bool)
            np.testing.assert_allclose(np.array(trace["logprobs"][own], float)[mask], wanted[mask], atol=2e-4)


def test_metrics_count_how_agents_end(played) -> None:
    run, _ = played
    lines = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert len(steps) == STEPS
    for line in steps:
        assert line["agents/ended/silent"] == line["agents/ended/crashed"] == 1 / SAMPLES
        assert line["agents/ended/ended"] == 1 - 2 / SAMPLES
        assert line["agents/branches"] > 1
    # Of tokens that the newest policy has sampled.
    differences = [line[AGREES] for line in steps if AGREES in line]
    assert differences and max(differences) < 1e-3


def test_a_killed_run_goes_on_and_leaves_nothing(played, tmp_path: Path) -> None:
    """Trajectories that were under way begin again, and none is trained twice."""
    run = Run(tmp_path, FLAGS, ranks=1, config="agent")
    try:
        run.wait_for("step 2/", 240)
        family = run.family()
        os.killpg(run.process.pid, signal.SIGKILL)
        assert survivors(family, 20) == []
        again = Run(tmp_path, [*FLAGS, "--resume", "auto"], ranks=1, config="agent")
        try:
            status, _ = again.end_of_all(240)
            assert status == 0, again.text()[-3000:]
        finally:
            again.end()
    finally:
        run.end()
    lines = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "reward" in line]
    assert steps == list(range(1, STEPS + 1))
