"""Environments of the library `verifiers` drive the model in a worker whose interpreter has that library.

The library wants packages that a trainer must not have, so that its interpreter is named: MGRPO_TEST_VERIFIERS_PYTHON.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mgrpo.environments.adaptors.verifiers import _plain
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.workers.environment_catalog import PROGRAM, Spec
from mgrpo.environments.workers.pool import describe
from tests.unit.environments.test_programs import Engine, ids, one, play

MODULES = str(Path(__file__).with_name("verifiers_modules"))
PYTHON = os.environ.get("MGRPO_TEST_VERIFIERS_PYTHON", "")
PATIENT = WorkerLimits(tool_timeout_s=20, reset_timeout_s=20)

needs_library = pytest.mark.skipif(not PYTHON, reason="MGRPO_TEST_VERIFIERS_PYTHON names no interpreter with verifiers")


def spec(**args: Any) -> Spec:
    return Spec(entry=f"{PROGRAM}verifiers", settings={"id": "mgrpo-test-games", "args": args})


def settings(row: dict[str, Any], **args: Any) -> dict[str, Any]:
    """Of `play`."""
    return {
        "own": spec(**args),
        "row": row,
        "python": PYTHON,
        "folders": [MODULES],
        "limits": PATIENT,
        "max_tokens": 400,
    }


@needs_library
def test_an_environment_with_tools_plays_a_task_of_its_own() -> None:
    """Its tools answer, its rubric rewards, and every sampled token stays where it was sampled."""
    engine = Engine('so!["add", {"a": 2, "b": 2}]', "4")
    group = play(engine, "", **settings({"prompt": "ignored", "example_id": 2}, kind="tools"))
    found = group.completions[0]
    assert group.prompt.tokens.tolist() == ids("[add]sAdd.|u2+2|>")
    call = 'so!["add", {"a": 2, "b": 2}]|'
    assert found.tokens.tolist() == ids(call + "tadd=4|>4|")
    assert found.loss_mask.tolist() == [True] * len(call) + [False] * len("tadd=4|>") + [True] * 2
    record = found.trajectory
    assert record is not None and (record.ended_by, record.reward) == ("stop", 1.0)
    assert record.metrics["mgrpo-test-games/right"] == 1 and record.metrics["mgrpo-test-games/length"] == 3


@needs_library
def test_a_row_with_an_answer_is_a_task_by_itself() -> None:
    row = {"prompt": [{"role": "user", "content": "7?"}], "answer": "7", "example_id": 1}
    group = play(Engine("6", "7"), "", **settings(row, kind="turns"))
    assert group.completions[0].tokens.tolist() == ids("6|uSure?|>7|")
    record = group.completions[0].trajectory
    assert record is not None and record.reward == 1


@needs_library
def test_a_full_trajectory_is_rewarded_and_cut() -> None:
    row = {"prompt": "7?", "answer": "6"}
    record = one(Engine("6"), "", **{**settings(row, kind="turns"), "max_tokens": 8}).trajectory
    assert record is not None and (record.ended_by, record.reward) == ("length", 1.0)


@needs_library
@pytest.mark.parametrize(
    ("fails", "why"),
    [("by itself", "the environment mgrpo-test-games failed: "), ("in its chats", "Refused: the messages that follow")],
)
def test_an_error_that_the_library_keeps_to_itself_gives_no_score(
    fails: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be rewarded like a bad answer."""
    row = {"prompt": "7?", "answer": "7"}
    record = one(Engine("7"), "", **settings(row, kind="turns", fails=fails)).trajectory
    assert record is not None and record.ended_by == "error" and record.reward is None
    assert why in caplog.text


@needs_library
def test_a_task_that_does_not_exist_has_no_score(caplog: pytest.LogCaptureFixture) -> None:
    record = one(Engine(), "", **settings({"prompt": "x", "example_id": 99})).trajectory
    assert record is not None and record.ended_by == "error"
    assert "example_id=99 is not in the environment's own data" in caplog.text


@needs_library
def test_an_environment_that_cannot_be_loaded_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="bad settings"):
        describe([spec(bad=True)], folders=[MODULES], python=PYTHON)


def test_calls_in_a_prompt_are_written_as_templates_read_them() -> None:
    """The library keeps arguments as JSON, and the name beside them."""
    message = {"role": "assistant", "tool_calls": [{"id": "1", "name": "add", "arguments": '{"a": 2}'}]}
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 2}}}
    assert _plain(message) == {"role": "assistant", "tool_calls": [call]} and _plain({"role": "user"}) == {
        "role": "user"
    }


def test_a_missing_library_is_named_with_its_remedy() -> None:
    if sys.executable == PYTHON:
        pytest.skip("the library is here")
    with pytest.raises(ValueError, match="or name an interpreter that has it as env_python"):
        describe([spec()], folders=[MODULES])
