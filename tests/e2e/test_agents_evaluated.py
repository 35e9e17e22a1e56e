"""Evaluations with an agent: by the real program, and how much of a chat the engine reads from its cache of prefixes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgrpo.moving import parse
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.vllm import actor
from mgrpo.run.commands.evaluate import ready
from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.samples import tables
from tests.e2e import recorded_asks
from tests.e2e.chatting_agent import TURNS
from tests.e2e.computing_actor import ComputingActor
from tests.e2e.launching import ROOT

BLOCK, CHATS = 32, 8
PROMPTS, SAMPLES = 2, 8
HELDOUT = ["--config", "examples/configs/agent.yaml", "--dataset_mixer_eval_list", "examples/calculator/heldout.jsonl"]


def test_an_agent_is_evaluated_by_the_real_program(tmp_path: Path) -> None:
    """As it is trained: every way of asking and ending is counted, and what has no score is in no mean."""
    pytest.importorskip("anthropic", reason="requirements/dev.txt has the client of Anthropic")
    words = [sys.executable, "-m", "mgrpo.cli", "eval", *HELDOUT, str(PROMPTS), "--eval_pass_at_k", str(SAMPLES)]
    words += ["--agent", "tests/e2e/several_agents.py:run", "--output_dir", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "eval" / "model"
    (line,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert line["eval/agents/ended/silent"] == line["eval/agents/ended/crashed"] == 1 / SAMPLES
    assert line["eval/agents/ended/ended"] == 1 - 2 / SAMPLES and line["eval/agents/branches"] > 1
    (paths,) = tables(folder / "rollouts").values()
    records = list(read_records(paths))
    assert len(records) == PROMPTS * SAMPLES
    endings = [record["trajectory"]["agent"]["ended"] for record in records]
    assert endings == [*["ended"] * 6, "silent", "crashed"] * PROMPTS
    scored = [record["reward"] for record in records if record["reward"] is not None]
    assert len(scored) == PROMPTS * (SAMPLES - 2)
    assert line["eval/scores"] == pytest.approx(np.mean(scored))


@pytest.mark.slow
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_turn_of_an_agent_computes_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """To the token: what a turn repeats is read from whole blocks of its own chat, and of no other."""
    monkeypatch.setattr(actor, "EngineActor", ComputingActor)
    monkeypatch.setattr(Dispatcher, "_read", Dispatcher._read)
    monkeypatch.chdir(ROOT)
    asks = tmp_path / "asks.jsonl"
    recorded_asks.record(str(asks))
    flags = [
        "--agent",
        "tests/e2e/chatting_agent.py:run",
        "--eval_pass_at_k",
        "1",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    flags += ["--response_length", "448", "--vllm_enable_prefix_caching", str(is_cached).lower()]
    with ready(parse([*HELDOUT, str(CHATS), *flags], defer=True), []) as (_, production):
        evaluated = production.evaluator.evaluate(done=0)
        (engine,) = production.evaluator.dispatcher.fleet.engines
        computed = engine._call("computed").result(60)
    assert len(evaluated.groups) == CHATS
    turns = [json.loads(line) for line in asks.read_text().splitlines()]
    assert len(turns) == CHATS * TURNS
    plain = sum(len(turn["before"]) + len(turn["sampled"]) - 1 for turn in turns)
    print(f"{CHATS} chats of {TURNS} turns: {computed} of {plain} tokens computed")
    assert turns and len({tuple(turn["before"]) for turn in turns}) > CHATS, "chats begin alike and go on otherwise"
    assert computed == plain - (is_cached and repeated(turns))


def repeated(turns: Sequence[Mapping[str, Any]]) -> int:
    """Tokens of whole blocks that turns begin with and that the turns before them have computed."""
    found = 0
    for turn in turns:
        said = [[*before["before"], *before["sampled"]] for before in turns]
        lengths = [len(tokens) for tokens in said if tokens == turn["before"][: len(tokens)]]
        found += max((length - 1) // BLOCK * BLOCK for length in [*lengths, 1])
    return found
