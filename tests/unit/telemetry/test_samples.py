"""Tables of completions: what a line says, and that a folder always holds exactly one run's."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from mgrpo.telemetry import files, samples
from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.samples import EvaluationTables, Traces, TrainSamples, branch_records, tables, trace_records
from mgrpo.types import AgentRecord, ScoredGroup, Turn
from tests import builders

NAN = float("nan")


def group(index: int = 7, rewards: tuple[float, ...] = (1.0, NAN), **fields) -> ScoredGroup:
    """A prompt of the second epoch, and one completion per reward."""
    question = {
        "id": (1, index),
        "text": "2+2=",
        "verifiers": ("math", "ifeval"),
        "ground_truths": ("4", {"func_name": "no_comma"}),
    }
    answers = [builders.completion([9, 1], logprobs=[-0.5, -1e-9], version=3, text="<b>4</b>\n") for _ in rewards]
    parts = [{"math": r, "ifeval": 0.5, "correct": r} for r in rewards]
    return builders.scored_group(rewards, completions=answers, parts=parts, of=builders.prompt(**(question | fields)))


def lines(path: Path) -> list[dict]:
    """Strict: NaN is not JSON, and other programs would refuse it."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_a_line_of_an_evaluation_says_everything_about_a_completion(tmp_path):
    """These lines explain why accuracy fell; a missing score is null, not 0."""
    EvaluationTables(tmp_path).write(20, [group()], [[True, False]])
    first, second = lines(tmp_path / "eval_step_20.jsonl")
    assert first == {
        "step": 20,
        "prompt_idx": 7,
        "sample_idx": 0,
        "prompt": "2+2=",
        "completion": "<b>4</b>\n",
        "verifiers": ["math", "ifeval"],
        "ground_truth": ["4", {"func_name": "no_comma"}],
        "scores": {"math": 1.0, "ifeval": 0.5},
        "reward": 1.0,
        "correct": True,
        "finish_reason": "stop",
        "num_tokens": 2,
        "policy_version": 3,
    }
    assert second == first | {
        "sample_idx": 1,
        "scores": {"math": None, "ifeval": 0.5},
        "reward": None,
        "correct": False,
    }


def test_what_is_no_json_is_written_all_the_same(tmp_path):
    """Labels come from tables that hold anything; a table that ends a run is worse than one with text in it."""
    odd = group(rewards=(1.0,), verifiers=("math",), ground_truths=(NAN,), text="half of a character: \ud83d, \u2028")
    EvaluationTables(tmp_path).write(1, [odd], None)
    (record,) = lines(tmp_path / "eval_step_1.jsonl")
    assert record["ground_truth"] == ["nan"] and record["correct"] is None
    assert record["prompt"] == odd.group.prompt.text


class Unprintable:
    def __str__(self):
        raise OSError("gone")


EXTRAS = [
    (None, None),
    (True, True),
    ("text", "text"),
    (3, 3),
    (0.25, 0.25),
    (NAN, None),
    (-float("inf"), None),
    (np.float32(0.25), 0.25),
    (np.float32("nan"), None),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (np.array(0.25), 0.25),
    (Decimal("0.25"), 0.25),
    ((1, [NAN, {"a": NAN}]), [1, [None, {"a": None}]]),
    ({(1, 2): NAN, 3: (4,)}, {"(1, 2)": None, "3": [4]}),
    (1j, "1j"),
    (np.array([1, 2]), "[1 2]"),
    (Path("a"), "a"),
    (Unprintable(), "<Unprintable>"),
    ({Unprintable(): 1}, {"<Unprintable>": 1}),
    (10**5000, "<int>"),
]


@pytest.mark.parametrize(("noted", "written"), EXTRAS, ids=lambda value: type(value).__name__)
def test_whatever_a_function_notes_is_written_as_strict_json(tmp_path, noted, written):
    """`log_extra` takes any value; it may neither end the run nor make a line unreadable."""
    scored = group(rewards=(1.0,))
    scored = replace(scored, scores=(replace(scored.scores[0], extras={"note": noted}),))
    EvaluationTables(tmp_path).write(1, [scored], None)
    Traces(tmp_path, "run").write(1, [scored], [], [0.0])
    for path in tmp_path.iterdir():
        (record,) = lines(path)
        assert record["extras"] == {"note": written} and type(record["extras"]["note"]) is type(written)


def test_a_note_that_holds_itself_is_written(tmp_path):
    """json alone would end the run with it."""
    loop = []
    loop.append(loop)
    scored = group(rewards=(1.0,))
    scored = replace(scored, scores=(replace(scored.scores[0], extras={"note": loop}),))
    EvaluationTables(tmp_path).write(1, [scored], None)
    assert "[[...]]" in json.dumps(lines(tmp_path / "eval_step_1.jsonl"))


def test_a_large_evaluation_is_cut_into_files(tmp_path, monkeypatch):
    """Every sample is kept, in order; and a later, smaller table leaves no shard of the earlier one behind."""
    monkeypatch.setattr(samples, "SHARD_LINES", 4)
    written = EvaluationTables(tmp_path)
    written.write(10, [group(index) for index in range(5)], None)
    assert [path.name for path in tables(tmp_path)[10]] == [
        "eval_step_10.jsonl",
        "eval_step_10-1.jsonl",
        "eval_step_10-2.jsonl",
    ]
    records = list(read_records(tables(tmp_path)[10]))
    assert [(r["prompt_idx"], r["sample_idx"]) for r in records] == [(i, s) for i in range(5) for s in range(2)]
    written.write(10, [group(index) for index in range(2)], None)
    assert [path.name for path in tables(tmp_path)[10]] == ["eval_step_10.jsonl"]
    written.write(9, [], None)
    assert list(tables(tmp_path)) == [9, 10] and lines(tmp_path / "eval_step_9.jsonl") == []


def test_a_table_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    """A run that dies while it writes leaves the table of before, and nothing that looks like a table."""
    written = EvaluationTables(tmp_path)
    written.write(10, [group(1)], None)
    before = contents(tmp_path)

    def die(*names):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        written.write(10, [group(2)], None)
    assert {name: text for name, text in contents(tmp_path).items() if not name.endswith(".partial")} == before
    assert tables(tmp_path).keys() == {10}


def test_a_new_run_puts_the_tables_of_an_earlier_one_aside(tmp_path):
    """Samples of two runs under one name would be read as one; what is not ours stays where it is."""
    EvaluationTables(tmp_path).write(10, [group(1)], None)
    (tmp_path / "notes.jsonl").write_text("mine")
    before = (tmp_path / "eval_step_10.jsonl").read_text()
    second = EvaluationTables(tmp_path)
    assert tables(tmp_path) == {}
    second.write(10, [group(2)], None)
    EvaluationTables(tmp_path)
    assert sorted(contents(tmp_path)) == ["eval_step_10.jsonl.1", "eval_step_10.jsonl.2", "notes.jsonl"]
    assert (tmp_path / "eval_step_10.jsonl.1").read_text() == before


def test_a_resumed_run_takes_out_the_tables_after_its_checkpoint(tmp_path):
    """They tell of steps that have not happened; those of the checkpoint's step and earlier stay as they are."""
    first = EvaluationTables(tmp_path)
    for step in (0, 5, 10, 15):
        first.write(step, [group(step)], None)
    before = contents(tmp_path)
    EvaluationTables(tmp_path, resumed_after=10)
    assert contents(tmp_path) == {name: text for name, text in before.items() if "15" not in name}


def test_traces_hold_every_completion_under_open_instructs_names():
    """Trained ones with their advantage, then those that a filter left out; logprobs as the engine gave them."""
    records = list(trace_records(4, [group(1)], [group(2, (0.0, 0.0))], [0.75, 0.0]))
    assert [(r["sample_idx"], r["prompt_idx"], r["prompt_id"]) for r in records] == [
        (0, 0, "1_1"),
        (1, 0, "1_1"),
        (2, 1, "1_2"),
        (3, 1, "1_2"),
    ]
    assert [r["advantage"] for r in records] == [0.75, 0.0, None, None]
    assert [r["reward"] for r in records] == [1.0, None, 0.0, 0.0]
    first = records[0]
    assert (first["step"], first["prompt_tokens"], first["response_tokens"]) == (4, [5, 6], [9, 1])
    assert (first["finish_reason"], first["dataset"]) == ("stop", ["math", "ifeval"])
    assert first["ground_truth"] == ["4", {"func_name": "no_comma"}]
    assert first["logprobs"] == pytest.approx([-0.5, 0.0], abs=1e-7)
    assert {"request_info", "scores", "policy_version"} <= first.keys()


def test_a_trace_says_what_each_branch_was_sampled_after():
    """What was sampled could not be scored again by another program."""
    said = ({"role": "user", "content": "and?"},)
    second_branch = replace(builders.branch(3, 4, [5, 6, 7]), parent=0, after=0, messages=said)
    agent = AgentRecord(ended="crashed", status=1, output="it ends\n", seconds=2.0, counts={"retries": 1.0})
    record = builders.trajectory("1101", branches=(builders.branch(0, 2), second_branch), agent=agent)
    completions = [builders.completion(4, trajectory=record), builders.completion(2)]
    first, second = trace_records(4, [builders.scored_group([1.0, 0.0], completions=completions)], [], [0.5, -0.5])
    assert first["branches"] == [
        {"start": 0, "end": 2, "prompt_tokens": [5, 6]},
        {"start": 3, "end": 4, "prompt_tokens": [5, 6, 7]},
    ]
    begun = {"parent": None, "after": None, "rewritten": False, "context_tokens": 2, "num_turns": 1, "messages": []}
    follows = {"parent": 0, "after": 0, "rewritten": True, "context_tokens": 3, "num_turns": 1, "messages": [*said]}
    assert first["trajectory"]["branches"] == [begun, follows]
    assert first["trajectory"]["agent"] == {
        "ended": "crashed",
        "status": 1,
        "output": "it ends\n",
        "seconds": 2.0,
        "counts": {"retries": 1.0},
    }
    assert "branches" not in second and (first["advantage"], second["advantage"]) == (0.5, -0.5)


@pytest.mark.parametrize(
    ("context", "is_rewritten"),
    [([5, 6, 7, 8, 1], False), ([5, 6, 7, 8, 2, 9, 3], False), ([5, 6, 7], True), ([5, 6, 1, 7, 8, 3], True)],
)
def test_a_branch_says_whether_it_repeats_what_it_goes_on_from(context, is_rewritten):
    """Where thinking is taken out of a history, a reader would look for tokens that the branch has not seen."""
    turns = tuple(builders.turn(*span) for span in ((0, 2), (3, 4), (4, 6)))
    branches = (builders.branch(0, 4), replace(builders.branch(4, 6, context), parent=0, after=0))
    record = builders.trajectory("110111", turns=turns, branches=branches)
    first, second = branch_records(builders.completion([7, 8, 2, 9, 4, 4], trajectory=record))
    assert (first["num_turns"], second["num_turns"]) == (2, 1)
    assert (first["rewritten"], second["rewritten"]) == (False, is_rewritten)


def in_turns() -> ScoredGroup:
    """A group of a trajectory that called twice, and of a completion of one turn."""
    turns = (
        Turn(start=0, end=2, calls=("search", "python"), failed=(False, True), seconds=(0.25, NAN), reward=0.5),
        Turn(start=3, end=4, num_unknown=1),
    )
    called = {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"x": np.float32(NAN)}}]}
    record = builders.trajectory(
        "1101",
        turns=turns,
        messages=(called, {"role": "tool", "content": "4"}),
        ended_by="max_calls",
        reward=NAN,
        metrics={"counter/count": 2.0},
    )
    completions = [builders.completion(4, trajectory=record, finish_reason="max_calls"), builders.completion(2)]
    return builders.scored_group([1.0, 0.0], completions=completions)


def test_a_trajectory_says_what_was_called_and_answered_and_who_ended_it(tmp_path):
    """Whether it calls, whether calls work and what they answered is all that explains a reward that does not rise."""
    EvaluationTables(tmp_path).write(1, [in_turns()], None)
    Traces(tmp_path, "run").write(1, [in_turns()], [], [0.5, -0.5])
    (first, plain), (traced, _) = (lines(path) for path in sorted(tmp_path.iterdir()))
    assert first["num_tokens"] == 3 and plain["num_tokens"] == 2
    assert traced["response_mask"] == [True, True, False, True] and len(traced["response_tokens"]) == 4
    assert "trajectory" not in plain and "response_mask" not in plain
    assert first["trajectory"] == traced["trajectory"]
    assert first["trajectory"] == {
        "ended_by": "max_calls",
        "turns": [
            {
                "num_tokens": 2,
                "calls": [
                    {"name": "search", "failed": False, "seconds": 0.25},
                    {"name": "python", "failed": True, "seconds": None},
                ],
                "unreadable_calls": 0,
                "unknown_calls": 0,
                "reward": 0.5,
            },
            {"num_tokens": 1, "calls": [], "unreadable_calls": 0, "unknown_calls": 1, "reward": 0.0},
        ],
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"x": None}}]},
            {"role": "tool", "content": "4"},
        ],
        "scored_text": "",
        "reward": None,
        "metrics": {"counter/count": 2.0},
    }


def steps(folder: Path) -> list[list[tuple[int, int]]]:
    """(step, sample) of every line, by shard."""
    return [[(r["step"], r["sample_idx"]) for r in lines(path)] for path in sorted(folder.glob("run_rollouts_*.jsonl"))]


def write(traces: Traces, *numbers: int) -> None:
    """Six completions per step."""
    for step in numbers:
        traces.write(step, [group(step, (1.0, 0.0))], [group(step + 100, (0.0,) * 4)], [0.5, -0.5])


@pytest.mark.parametrize("shard_lines", [4, 5, 6, 7, 100])
@pytest.mark.parametrize("resumed_after", [0, 1, 2, 3, 4])
def test_a_resumed_run_writes_what_an_uninterrupted_one_would(tmp_path, monkeypatch, shard_lines, resumed_after):
    """No line twice, none lost, wherever shards and checkpoints fall; a line cut off by a crash is removed as well."""
    monkeypatch.setattr(samples, "SHARD_LINES", shard_lines)
    write(Traces(tmp_path / "whole", "run"), *range(1, 6))
    write(Traces(tmp_path / "resumed", "run"), *range(1, 5))
    newest = sorted((tmp_path / "resumed").iterdir())[-1]
    newest.write_text(newest.read_text() + '{"step": 5, "sample_')
    write(Traces(tmp_path / "resumed", "run", resumed_after=resumed_after), *range(resumed_after + 1, 6))
    assert steps(tmp_path / "resumed") == steps(tmp_path / "whole")
    assert [line for shard in steps(tmp_path / "whole") for line in shard] == [
        (s, i) for s in range(1, 6) for i in range(6)
    ]
    assert all(len(shard) <= shard_lines for shard in steps(tmp_path / "whole"))


def test_a_new_run_puts_traces_of_its_own_name_aside(tmp_path):
    """Many runs may share a folder; only the same run's older files are in the way."""
    write(Traces(tmp_path, "run"), 1, 2)
    write(Traces(tmp_path, "other"), 1)
    before = contents(tmp_path)
    write(Traces(tmp_path, "run"), 1)
    after = contents(tmp_path)
    assert after["run_rollouts_000000.jsonl.1"] == before["run_rollouts_000000.jsonl"]
    assert after["other_rollouts_000000.jsonl"] == before["other_rollouts_000000.jsonl"]
    assert len(after["run_rollouts_000000.jsonl"].splitlines()) == 6


def test_traces_and_samples_have_the_text_and_the_logprob_of_each_token(tmp_path):
    """What the report colours; what stands between turns was not sampled, and has no log-probability."""
    record = builders.trajectory("1101")
    long = builders.completion(4, trajectory=record, logprobs=-0.123456789)
    scored = builders.scored_group([1.0], completions=[long])

    def pieces(tokens):
        return [f"<{token}>" for token in tokens]

    (trace,) = trace_records(1, [scored], [], [0.5], pieces)
    TrainSamples(tmp_path, 4, pieces=pieces).write(1, [scored], [], [0.5])
    (sample,) = lines(tmp_path / "train_samples.jsonl")
    assert trace["tokens"] == sample["tokens"] == pieces(trace["response_tokens"])
    assert trace["logprobs"] == [pytest.approx(-0.1234568, abs=1e-9)] * 2 + [None, pytest.approx(-0.1234568, abs=1e-9)]
    assert sample["logprobs"] == [-0.1235, -0.1235, None, -0.1235]
    assert (trace["prompt"], trace["completion"]) == (scored.group.prompt.text, long.text)
