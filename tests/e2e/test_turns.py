"""Several turns with a tool, in earnest: what is trained on, that runs repeat and go on, and tools that hang, die and fail.

Most compare a short run with the first steps of a long one, so nothing may depend on how many steps are still to come.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from tests.e2e.interrupted import origins
from tests.e2e.launching import Run, survivors

STEPS, BATCH, SHORT = 20, 256, 4
LIMIT_S = 300
FLAGS = [
    *("--tensor_model_parallel_size", "1", "--save_freq", "2", "--eval_pass_at_k", "1"),
    *("--lr_scheduler_type", "constant", "--warm_up_steps", "0"),
]
TRACES = ["--save_traces", "true"]
VERSIONED = ("tests/e2e/versioned_traces.py",)
END_OF_TURN = 2
CLOCKS = "time/"
AGREES = "debug/vllm_vs_local_logprob_diff_mean"


def launch(folder: Path, steps: int, flags: Sequence[str] = (), **options: Any) -> Run:
    """The calculator, on one rank."""
    all_flags = [*FLAGS, "--total_episodes", str(steps * BATCH), *flags]
    return Run(folder, all_flags, **({"ranks": 1, "config": "calculator"} | options))


def finish(folder: Path, steps: int, flags: Sequence[str] = (), **options: Any) -> Run:
    """A run to its end, which leaves no process."""
    folder.mkdir(exist_ok=True)
    run = launch(folder, steps, flags, **options)
    try:
        status, family = run.end_of_all(LIMIT_S)
        assert status == 0, run.text()[-3000:]
    finally:
        run.end()
    assert survivors(family, 20) == []
    return run


def metrics(run: Run) -> list[dict[str, Any]]:
    """Every line, clock readings apart."""
    lines = map(json.loads, (run.output_dir / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith(CLOCKS)} for line in lines]


def steps_of(run: Run) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "reward" in line]


def traces(run: Run) -> list[dict[str, Any]]:
    """Every trajectory that was trained on, in order."""
    paths = sorted((run.output_dir / "rollouts").glob("*_rollouts_*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def by_sample(run: Run) -> dict[tuple[str, int], dict[str, Any]]:
    """Traces of a single step by prompt and sample: their order depends on rewards."""
    counts: Counter[str] = Counter()
    found = {}
    for trace in traces(run):
        name = trace["prompt_id"]
        found[name, counts[name]] = trace
        counts[name] += 1
    return found


def weights(run: Run, step: int) -> dict[str, bytes]:
    """The tensors of the model that was exported after this step, bit for bit."""
    with safe_open(run.output_dir / "hf" / f"step_{step}" / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118


def parts(trace: dict[str, Any]) -> list[tuple[bool, slice]]:
    """What was sampled, and what was not, by turns."""
    mask = np.array(trace["response_mask"])
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(bool(mask[a]), slice(a, b)) for a, b in itertools.pairwise(cuts)]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("learned"), STEPS, TRACES, program=VERSIONED)


def test_a_model_learns_to_use_its_tool(learned) -> None:
    before, after = (line["eval/pass_at_1"] for line in metrics(learned) if "eval/pass_at_1" in line)
    assert after > before + 0.15
    calls = [line["tools/calculate/avg_calls_per_rollout"] for line in steps_of(learned)]
    assert len(calls) == STEPS and calls[0] < 1 < calls[-1]


def test_trainer_and_engine_agree_on_every_turn(learned) -> None:
    """A bridge that the trainer sees otherwise than the engine did, or a block of another turn, makes every ratio wrong."""
    for line in steps_of(learned):
        assert line[AGREES] < 1e-4 and line["debug/vllm_vs_local_logprob_diff_max"] < 1e-2
        assert line["turns/max"] == 3


def test_what_was_not_sampled_is_the_tools_text_in_the_models_template(learned) -> None:
    """A mask that is off by one trains on what the tool wrote, or leaves out the end of a turn."""
    tokenizer = Tokenizer.from_file("examples/calculator/model/tokenizer.json")
    all_traces, num_long = traces(learned), 0
    for trace in (*all_traces[:BATCH], *all_traces[-BATCH:]):
        found = parts(trace)
        turns = trace["trajectory"]["turns"]
        num_long += len(turns) == 3
        assert [is_sampled for is_sampled, _ in found] == [number % 2 == 0 for number in range(2 * len(turns) - 1)]
        assert [part.stop - part.start for _, part in found[::2]] == [turn["num_tokens"] for turn in turns]
        # Every turn that was answered ended by itself.
        assert all(trace["response_tokens"][part.stop - 1] == END_OF_TURN for _, part in found[:-1:2])
        answers = [message["content"] for message in trace["trajectory"]["messages"] if message["role"] == "tool"]
        for (_, part), turn in zip(found[1::2], turns, strict=False):
            num_answers = len(turn["calls"])
            own, answers = answers[:num_answers], answers[num_answers:]
            if any(call["failed"] for call in turn["calls"]):
                continue  # What it was told is long, and was cut.
            shown = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in own)
            text = tokenizer.decode(trace["response_tokens"][part], skip_special_tokens=False)
            assert text == f"\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n"
        # What would not be followed by another token is not there.
        assert not answers or trace["trajectory"]["ended_by"] == "length"
    assert num_long > BATCH


def test_only_what_was_sampled_has_a_version_and_a_logprob(learned) -> None:
    for trace in traces(learned):
        mask, logprobs = np.array(trace["response_mask"]), np.array(trace["logprobs"], float)
        assert np.isnan(logprobs[~mask]).all() and (logprobs[mask] <= 0).all() and logprobs[mask].any()
        assert trace["policy_versions"] == np.where(mask, trace["step"] - 1, -1).tolist()


def test_a_run_that_dies_between_two_turns_goes_on_as_if_it_had_not(learned, tmp_path) -> None:
    """Up to then it is the other run over again, although tools answer in another order and time."""
    checkpoints = ["--checkpoint_state_freq", "2"]
    dead = launch(tmp_path, SHORT, checkpoints, program=("tests/e2e/faulty.py", "kill second turn", str(SHORT)))
    try:
        status, family = dead.end_of_all(LIMIT_S)
        assert status != 0 and "SIGKILL" in dead.text(), dead.text()[-3000:]
    finally:
        dead.end()
    assert survivors(family, 40) == []
    assert metrics(dead) == metrics(learned)[:SHORT] and weights(dead, 2) == weights(learned, 2)

    run = finish(tmp_path, SHORT, checkpoints)
    assert origins(run) == [2]
    assert metrics(run)[:-1] == metrics(learned)[: 1 + SHORT]
    assert weights(run, SHORT) == weights(learned, SHORT)


TOOL = '''
import os, subprocess, time
from pathlib import Path

IS_REPLACEMENT = Path(__file__).with_name("hung").exists()

def is_first(what):
    try:
        os.close(os.open(Path(__file__).with_name(what), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def calculate(expression: str) -> str:
    """Calculate.

    Args:
        expression: What.
    """
    if IS_REPLACEMENT and is_first("died"):
        os._exit(1)
    if is_first("hung"):
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if "7" in expression:
        raise RuntimeError("no sevens")
    left, sign, right = expression.partition("*" if "*" in expression else "+")
    return str(int(left) * int(right) if sign == "*" else int(left) + int(right))
'''
"""One call hangs; in the process that replaces the one with that call, the first call ends it; and some fail."""


def test_a_tool_that_hangs_dies_and_fails_is_counted_and_ends_no_run(tmp_path) -> None:
    """Hours into a run one of ten thousand calls does."""
    (tmp_path / "tool.py").write_text(TOOL)
    flags = ["--tools", f"{tmp_path / 'tool.py'}:calculate", "--tool_timeout", "1", "--env_workers", "3"]
    run = finish(tmp_path, 4, [*flags, *TRACES])
    lines, found = steps_of(run), traces(run)
    assert (tmp_path / "hung").exists() and (tmp_path / "died").exists()
    assert len(lines) == 4 and all(line[AGREES] < 1e-4 for line in lines)
    # The first evaluation's are counted in the first step; a busy machine may be late as well.
    assert sum(line["env/timeouts"] for line in lines) >= 1 and sum(line["env/replaced"] for line in lines) >= 2
    turns = [turn for trace in found for turn in trace["trajectory"]["turns"]]
    failed = [call["failed"] for turn in turns for call in turn["calls"] if call["name"]]
    counted = [line["tools/aggregate/failure_rate"] * line["tools/aggregate/avg_calls_per_rollout"] for line in lines]
    assert sum(counted) * BATCH == pytest.approx(sum(failed)) and 0 < sum(failed) < len(failed)

    # Those of the process that died have no score; the others go on, told that their calls have failed.
    lost = [trace for trace in found if trace["trajectory"]["ended_by"] == "error"]
    assert len(lost) == sum(round(line["turns/ended_by/error"] * BATCH) for line in lines)
    assert 0 < len(lost) < BATCH and all(trace["reward"] is None for trace in lost)
    shown = [message["content"] for trace in found for message in trace["trajectory"]["messages"]]
    assert '{"error": "RuntimeError: no sevens"}' in shown
    assert "TimeoutError: no answer within 1 s" in (run.output_dir / "rollouts" / "eval_step_0.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor_model_parallel_size", "context_parallel_size"])
def test_two_ranks_agree_with_the_engine(tmp_path, size) -> None:
    """Tokens that nothing predicts lie between those of a sequence, and its ranks cut it anywhere."""
    run = finish(tmp_path, 3, [f"--{size}", "2"], ranks=2)
    assert all(line[AGREES] < 1e-4 and line["turns/max"] == 3 for line in steps_of(run))


@pytest.mark.slow
def test_cached_turns_have_the_logprobs_of_turns_that_were_read_again(learned, tmp_path) -> None:
    """Blocks of another trajectory, or of weights of the past, look like these and are wrong."""
    # Stop strings give every turn a random stream of its own: what an engine reads at a time changes no sample.
    flags = ["--model_name_or_path", str(learned.output_dir / "hf" / f"step_{STEPS}"), "--stop_strings", "no such text"]
    cached, plain = (
        by_sample(finish(tmp_path / kind, 1, [*flags, *TRACES, "--vllm_enable_prefix_caching", kind]))
        for kind in ("true", "false")
    )
    assert len(cached) == BATCH and cached.keys() == plain.keys()
    same = [name for name, trace in cached.items() if trace["response_tokens"] == plain[name]["response_tokens"]]
    for name in same:
        np.testing.assert_allclose(*(np.array(found[name]["logprobs"], float) for found in (cached, plain)), atol=1e-5)
    # Rounding makes a few another sample.
    assert len(same) > 0.95 * BATCH
    assert sum(len(cached[name]["trajectory"]["turns"]) == 3 for name in same) > BATCH / 2


@pytest.mark.slow
def test_weights_that_change_between_turns_only_become_newer(tmp_path) -> None:
    """Of a trajectory's tokens each is corrected by the policy that it is marked with, and none may be older than was asked for."""
    oldest = 2
    flags = ["--async_steps", "1", "--max_staleness", str(oldest), "--inflight_updates", "true"]
    run = finish(tmp_path, 8, [*flags, "--use_rho_correction", "true", *TRACES], program=VERSIONED)
    num_mixed = 0
    for trace in traces(run):
        mask, versions = np.array(trace["response_mask"]), np.array(trace["policy_versions"])
        assert (versions[~mask] == -1).all() and (np.diff(versions[mask]) >= 0).all()
        assert 0 <= trace["step"] - 1 - versions[mask].min() <= oldest
        num_mixed += versions[mask].min() < versions[mask].max()
    assert num_mixed > 0
    assert all(line["async/age_max"] <= oldest for line in steps_of(run))
