"""examples/python_tool: its questions, their code and the committed files go together."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import random
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "python_tool"


@pytest.fixture(scope="module")
def task():
    spec = importlib.util.spec_from_file_location("python_tool_task", FOLDER / "task.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_code_of_each_question_prints_its_answer(task):
    """A model that learns to write it would be told that it is wrong."""
    rng = random.Random(3)
    kinds = set()
    for problem in (task.draw(rng) for _ in range(60)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(problem.code, "code", "exec"), {})
        assert printed.getvalue() == f"{problem.answer}\n", problem
        kinds.add(problem.kind)
    assert kinds == {"products", "sort", "digits"}


def test_the_committed_rows_are_those_of_the_task(task):
    """Held-out questions that training has seen would show too good a result."""
    train, held_out = task.split_problems()
    for name, problems in (("train", train), ("heldout", held_out)):
        rows = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
        assert [(row["messages"][0]["content"], row["ground_truth"]) for row in rows] == [
            (problem.question, str(problem.answer)) for problem in problems
        ]
    assert (len(train), len(held_out)) == (2000, 100) and not set(train) & set(held_out)


def test_conversations_are_read_as_calls_of_the_tool(task):
    """The model would be trained to write calls that no run recognizes."""
    rng = random.Random(5)
    for problem in (task.draw(rng) for _ in range(20)):
        (_, _), (call, is_own), (answer, _), (end, _) = task.transcript(problem, rng, guessed=0.0, wrong=0.0)
        parsed = task.FORMAT.parse(call)
        assert is_own and [dict(found.arguments) for found in parsed.calls] == [{"code": problem.code}]
        assert answer == f"<output>\n{problem.answer}\n\n</output>\n" and end == f"{problem.answer}<|im_end|>"


def test_the_committed_model_is_small_and_has_the_template_of_the_task(task):
    """Every clone downloads it."""
    files = list((FOLDER / "model").iterdir())
    assert sum(file.stat().st_size for file in files) < 2_500_000
    assert (FOLDER / "model" / "chat_template.jinja").read_text() == task.TEMPLATE
