"""Engines that are killed, frozen, added and removed while a run goes on: it finishes, learns the same, and says what happened."""

from __future__ import annotations

import json
import re

import pytest

from mgrpo.cli import main
from tests.e2e.launching import Run, survivors
from tests.e2e.test_asynchronous import prompts

PROGRAM = "tests/e2e/failing_engines.py"
IMPATIENT = ["--engine_heartbeat_timeout", "8", "--weight_sync_timeout", "10", "--engine_max_restarts", "50"]
PHASES = ("generate", "pause", "transfer", "evaluation", "join")
REASONS = {
    # What is said of an engine after each fault; several calls of a killed one fail at once.
    **{f"kill {phase}": r"could not [^:]+: " for phase in PHASES},
    **{f"freeze {phase}": r"no answer within engine_heartbeat_timeout=8 s" for phase in PHASES},
    # Its core may have done its part when its actor is frozen.
    "freeze transfer": r"could not receive weights, version \d+.* within weight_sync_timeout=10 s",
    "freeze join": r"could not join the weight-transfer group.* (for |within weight_sync_timeout=)10 s",
}


def accuracy(run: Run) -> float:
    """After training."""
    lines = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").open()]
    return [line["eval/pass_at_1"] for line in lines if "eval/pass_at_1" in line][-1]


def struck(run: Run) -> dict[str, tuple[int, str]]:
    """For each fault the engine, and what was said from there until the next one."""
    parts = re.split(r"^((?:kill|freeze) [a-z ]+): engine (\d), .*\n", run.text(), flags=re.M)
    return {parts[i]: (int(parts[i + 1]), parts[i + 2]) for i in range(1, len(parts), 3)}


def finish(run: Run, timeout_s: float) -> None:
    """To a good end, with no process left."""
    family = run.family()
    assert run.wait(timeout_s) == 0, run.text()[-3000:]
    assert survivors(family, 20) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("inflight", [False, True])
def test_engines_fail_in_every_phase_and_the_run_learns_all_the_same(tmp_path, inflight) -> None:
    """A long run on many engines meets each of these."""
    faults = [f"{how} {phase}" for phase in PHASES for how in ("kill", "freeze")]
    flags = [
        "--vllm_num_engines",
        "2",
        "--async_steps",
        "1",
        "--local_eval_every",
        "6",
        "--save_traces",
        "true",
        *IMPATIENT,
    ]
    if inflight:
        flags += ["--max_staleness", "2", "--inflight_updates", "true"]
    run = Run(tmp_path, flags, program=(PROGRAM, ",".join(faults)))
    try:
        run.wait_for("\nstep ", 240)
        finish(run, 1200)
    finally:
        run.end()
    found = struck(run)
    for fault in faults:
        engine, said = found[fault]
        died = re.findall(rf"^mgrpo: engine {engine} is dead and is started again: (.*)", said, flags=re.M)
        assert len(died) == 1 and re.match(REASONS[fault], died[0]), (fault, said)
        assert f"mgrpo: engine {engine} has loaded its model and waits for a weight sync" in said, (fault, said)
        assert f"mgrpo: engine {engine} has joined and serves the weights of version " in said, (fault, said)
    counted = prompts(run)
    assert set(counted.values()) == {1} and len(counted) == 120 * 32
    assert accuracy(run) > 0.92


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_one_engine_waits_for_it(tmp_path) -> None:
    """It gets its weights while the learners wait: no step without groups, and no ordinary sync without a step."""
    faults = ["kill generate", "freeze evaluation", "kill transfer"]
    flags = ["--local_eval_every", "4", "--save_traces", "true", "--total_episodes", str(16 * 256), *IMPATIENT]
    run = Run(tmp_path, flags, program=(PROGRAM, ",".join(faults)))
    try:
        run.wait_for("\nstep ", 240)
        finish(run, 400)
    finally:
        run.end()
    assert [*struck(run)] == faults
    assert all("mgrpo: engine 0 has joined and serves" in said for _, said in struck(run).values())
    counted = prompts(run)
    assert set(counted.values()) == {1} and len(counted) == 16 * 32


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_are_added_and_removed_while_the_run_goes_on(tmp_path, capsys) -> None:
    """Machines become free, or are needed elsewhere."""
    run = Run(tmp_path, ["--total_episodes", str(256 * 400), "--async_steps", "1", *IMPATIENT], program=None)
    place = ("--run", str(run.output_dir))
    try:
        run.wait_for("\nstep ", 240)
        assert main(["engines", "add", *place]) == 0
        run.wait_for("engine 1 has joined and serves", 120)
        assert main(["engines", "remove", "0", *place]) == 0
        run.wait_for("engine 0 is gone", 60)
        assert main(["engines", "remove", "1", *place]) == 2
        assert main(["engines", "list", *place]) == 0
        finish(run, 600)
    finally:
        run.end()
    said = capsys.readouterr()
    assert "cannot go: the run has 1 engines, and min_engines=1" in said.err
    assert re.search(r"engine 0 +retired +starts: 1\nengine 1 +serving +starts: 1\n", said.out)
