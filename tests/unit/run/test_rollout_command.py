"""What `mgrpo rollout` samples, and what it prints of it."""

from __future__ import annotations

import dataclasses
import io
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mgrpo import cli
from mgrpo.config import Config, ConfigError
from mgrpo.data.tokenizer import load_tokenizer
from mgrpo.moving import from_values
from mgrpo.run.commands import evaluate
from mgrpo.run.commands.sample import first_prompts, num_of, show_completion, spans
from mgrpo.run.produce import production
from mgrpo.types import AgentRecord, Branch, Completion, Score
from tests.builders import branch, completion, prompt, trajectory, turn

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "calculator" / "model"
GREEN, YELLOW, DIM = "\x1b[32m", "\x1b[33m", "\x1b[2m"


@pytest.mark.parametrize(
    ("words", "num", "rest"),
    [
        ([], 4, []),
        (["--num", "3", "--seed", "1"], 3, ["--seed", "1"]),
        (["--seed", "1", "--num=12"], 12, ["--seed", "1"]),
        (["--num_epochs", "2"], 4, ["--num_epochs", "2"]),
    ],
)
def test_the_number_of_prompts_is_taken_out_of_the_words(words: list[str], num: int, rest: list[str]) -> None:
    """The other words are settings."""
    assert num_of(words) == (num, rest)


@pytest.mark.parametrize("words", [["--num"], ["--num="], ["--num", "0"], ["--num", "-1"], ["--num", "1.5"]])
def test_another_number_of_prompts_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected the number of prompts, at least 1"):
        num_of(words)


TRAIN, HELD_OUT = ["a", "1.0", "b", "0.5"], ["c", "1.0", "d", "8"]


@pytest.mark.parametrize(
    ("values", "mix", "splits"),
    [
        ({"dataset_mixer_list": TRAIN, "dataset_mixer_list_splits": ["x", "y"]}, ("a", "3"), ("x",)),
        (
            {
                "dataset_mixer_list": TRAIN,
                "dataset_mixer_eval_list": HELD_OUT,
                "dataset_mixer_eval_list_splits": ["test", "y"],
            },
            ("c", "3"),
            ("test",),
        ),
        ({}, (), None),
    ],
)
def test_the_first_prompts_are_held_out_ones_or_else_those_of_the_training(
    values: dict[str, Any], mix: tuple[str, ...], splits: tuple[str, ...] | None
) -> None:
    """A whole data set, sampled several times, is an evaluation."""
    config = first_prompts(from_values(values | {"eval_pass_at_k": 8}), 3)
    assert config.data.dataset_mixer_eval_list == mix
    assert splits is None or config.data.dataset_mixer_eval_list_splits == splits
    assert config.rollout.eval_pass_at_k == 1


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("", []),
        ("1", [(0, 1, True)]),
        ("000", [(0, 3, False)]),
        ("11010", [(0, 2, True), (2, 3, False), (3, 4, True), (4, 5, False)]),
    ],
)
def test_spans_are_runs_of_equal_values(mask: str, expected: list[tuple[int, int, bool]]) -> None:
    assert spans(np.array([mark == "1" for mark in mask], np.bool_)) == expected


def shown(of: Completion, score: Score, *, color: bool = False) -> str:
    out = io.StringIO()
    system = "standard" if color else None
    console = Console(file=out, force_terminal=color, color_system=system, width=40, highlight=False)
    show_completion(console, prompt(id=(0, 7), text="1+1 [bold]"), of, score, load_tokenizer(MODEL))
    return out.getvalue()


def in_turns() -> Completion:
    """A call, its answer, and an end: 5 of 8 tokens are sampled."""
    tokenizer = load_tokenizer(MODEL)
    ids = [
        *tokenizer("ab<|im_end|>")["input_ids"],
        *tokenizer("[c]")["input_ids"],
        *tokenizer("d<|im_end|>")["input_ids"],
    ]
    assert len(ids) == 8
    played = trajectory(
        "11100011",
        turns=(turn(0, 3, calls=("calculate", "")), turn(6, 8)),
        ended_by="max_calls",
        scored_text="d[/bold]",
    )
    return completion(ids, trajectory=played)


def test_a_completion_is_printed_with_its_turns_and_what_came_of_it() -> None:
    """What is written in brackets is text, also where rich would take it for a colour."""
    lines = shown(in_turns(), Score(reward=2.5, parts={"integer": 1.0})).splitlines()
    assert "prompt 7" in lines[0]
    assert lines[1] == "1+1 [bold]ab<|im_end|>[c]d<|im_end|>"
    assert lines[2].split(" | ") == [
        "reward 2.5",
        "integer 1",
        "2 turns",
        "calls: calculate, (not a tool)",
        "ended by max_calls",
        "scored: 'd[/bold]' 5 of 8 tokens sampled",
    ]


def test_what_is_sampled_has_another_colour_than_what_stands_between() -> None:
    text = shown(in_turns(), Score(reward=0.0, parts={}), color=True)
    assert f"{DIM}1+1 [bold]" in text and f"{GREEN}ab<|im_end|>" in text and f"{YELLOW}[c]" in text
    assert f"{GREEN}d<|im_end|>" in text


def test_a_completion_of_one_turn_has_no_calls() -> None:
    of_one = shown(completion([2], finish_reason="length"), Score(reward=1.0, parts={}))
    assert "reward 1 | ended by length 1 of 1 tokens sampled" in of_one and "turn" not in of_one
    played = completion([2], trajectory=trajectory("1"))
    assert " 1 turn | calls: none | ended by stop | scored: ''" in shown(played, Score(reward=1.0, parts={}))


def a_tree() -> Completion:
    """A branch with a bridge, a fork after its first turn, and a branch of a context of its own."""
    tokenizer = load_tokenizer(MODEL)

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    parts = [("a<|im_end|>", True), ("[", False), ("b<|im_end|>", True), ("c<|im_end|>", True), ("d<|im_end|>", True)]
    lengths = [len(ids(text)) for text, _ in parts]
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends]
    mask = "".join(str(int(is_sampled)) * length for (_, is_sampled), length in zip(parts, lengths, strict=True))
    context = ids("1+1=")
    forked = Branch(
        prompt_tokens=np.array([*context, *ids("a<|im_end|>"), *ids("2+2=")], np.int32),
        start=starts[3],
        end=ends[3],
        parent=0,
        after=0,
    )
    played = trajectory(
        mask,
        turns=tuple(turn(starts[place], ends[place]) for place in (0, 2, 3, 4)),
        branches=(branch(0, ends[2], context), forked, branch(starts[4], ends[4], ids("3+3="))),
        agent=AgentRecord(
            ended="crashed",
            status=3,
            output="\x1b[2Jgone\n",
            seconds=1.5,
            counts={"overridden/top_p": 2.0, "retries": 0.0},
        ),
    )
    return completion([token for text, _ in parts for token in ids(text)], trajectory=played)


def test_a_tree_is_printed_branch_after_branch_from_where_it_leaves_another() -> None:
    """One who debugs an agent looks for the request that went astray, and reads no context twice."""
    lines = shown(a_tree(), Score(reward=float("nan"), parts={})).splitlines()
    assert lines[1:7] == [
        "-- branch 1 begins by itself, 4 tokens before it",
        "1+1=a<|im_end|>[b<|im_end|>",
        f"-- branch 2 goes on from branch 1 after turn 1, {len(a_tree().trajectory.branches[1].prompt_tokens)} tokens before it",  # type: ignore[union-attr]
        "2+2=c<|im_end|>",
        "-- branch 3 begins by itself, 4 tokens before it",
        "3+3=d<|im_end|>",
    ]
    assert " | agent crashed with status 3 after 1.5 s | overridden/top p 2 | scored" in lines[7]
    assert lines[8] == "printed by the agent: \\x1b[2Jgone"
    text = shown(a_tree(), Score(reward=0.0, parts={}), color=True)
    assert f"{DIM}2+2=" in text and f"{GREEN}c<|im_end|>" in text and f"{YELLOW}[" in text and "\x1b[2J" not in text


def test_a_branch_whose_context_is_written_again_is_printed_with_all_of_it() -> None:
    """Only there can one see what was left out of it."""
    tree = a_tree()
    assert tree.trajectory is not None
    first, second, third = tree.trajectory.branches
    rewritten = dataclasses.replace(second, prompt_tokens=second.prompt_tokens[1:])
    record = dataclasses.replace(tree.trajectory, branches=(first, rewritten, third))
    lines = shown(dataclasses.replace(tree, trajectory=record), Score(reward=0.0, parts={})).splitlines()
    assert "its context written again" in lines[3] and lines[4] == "+1=a<|im_end|>2+2=c<|im_end|>"


def test_what_a_terminal_would_obey_is_printed_as_text() -> None:
    """A completion or a prompt could clear the screen, or write to the clipboard."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=40)
    hostile = prompt(text="\x1b]52;c;AAAA\x07")
    show_completion(console, hostile, completion([2]), Score(reward=0.0, parts={}), load_tokenizer(MODEL))
    assert "\x1b" not in out.getvalue() and "\\x1b]52;c;AAAA" in out.getvalue()


def configured(folder: Path, **values: object) -> Config:
    data = {"dataset_mixer_eval_list": [str(ROOT / "examples/calculator/heldout.jsonl"), "2"], "tools": ["calculate"]}
    lengths = {"max_prompt_token_length": 24, "response_length": 136, "pack_length": 512}
    own = {"output_dir": str(folder / "out"), "dataset_local_cache_dir": str(folder / "cache")}
    return from_values({"model_name_or_path": str(MODEL), "async_steps": 2, **data, **lengths, **own, **values})


def test_what_is_made_ready_is_an_evaluation_and_ends_with_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rollout and an evaluation must not wait for steps, or leave their handler of signals behind."""
    events: list[str] = []

    @contextmanager
    def started(config: Config, inputs: Any, *, num_local_learners: int, on_failure: None) -> Iterator[SimpleNamespace]:
        assert num_local_learners == 0 and on_failure is None and inputs.prompts.language is not None
        events.append("started")
        yield SimpleNamespace(config=config, inputs=inputs)
        events.append("ended")

    monkeypatch.setattr(production, "started", started)
    monkeypatch.setattr(production, "prepare", lambda config, parts: parts)
    before = signal.getsignal(signal.SIGTERM)
    with evaluate.ready(configured(tmp_path, preset="open_instruct_main"), []) as (config, parts):
        assert signal.getsignal(signal.SIGTERM) is not before
        assert config is parts.config and config.rollout.async_steps == 0 and not len(parts.inputs.train)
        assert config.experiment.output_dir == str(tmp_path / "out" / "eval" / "model")
        assert parts.inputs.toolset.plays_in_rounds(config)
    assert events == ["started", "ended"] and signal.getsignal(signal.SIGTERM) is before
    assert "mgrpo: preset open_instruct_main" in capsys.readouterr().err


def test_nothing_is_started_with_tools_that_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All problems in one message, and exit code 2."""
    monkeypatch.setattr(production, "started", None)
    flags = [
        "--tools",
        "calculater",
        "--output_dir",
        str(tmp_path),
        "--dataset_local_cache_dir",
        str(tmp_path / "cache"),
    ]
    config = str(ROOT / "examples/configs/calculator.yaml")
    monkeypatch.chdir(ROOT)
    assert cli.main(["rollout", "--num", "2", "--config", config, *flags]) == 2
    text = capsys.readouterr().err
    assert "the tools cannot be started: there is no tool calculater; did you mean calculate?" in text
    assert cli.main(["rollout", "--num", "x", "--config", config]) == 2
    assert "--num=x: expected the number of prompts, at least 1" in capsys.readouterr().err
