"""Which teacher a row has, what a template may say, and what is wrong with either before the start."""

from __future__ import annotations

import json

import pytest

from mgrpo.moving import from_values
from mgrpo.run.inputs.reading import read_inputs
from mgrpo.run.inputs.row_teachers import RowTeachers, TeacherTemplate, template_remarks

SEVERAL = ["math:BIG1,Code:BIG2", "org/hard:BIG3", "BIG4"]


def teachers(*entries: str) -> RowTeachers:
    return RowTeachers(from_values({"teacher_model_name_or_path": list(entries)}).distillation)


@pytest.mark.parametrize(
    ("columns", "source", "expected"),
    [
        ({"teacher": "code", "dataset": "math"}, "math.jsonl", 1),
        ({"teacher": "none", "dataset": "math"}, "math.jsonl", -1),
        ({"teacher": None, "dataset": ["integer", "MATH", "code"]}, "data/code.jsonl", 0),
        ({"dataset": "gsm8k"}, "data/code.jsonl", 1),
        ({}, "someone/math", 0),
        ({}, "org/hard", 2),
        ({"dataset": "gsm8k"}, "other/hard", 3),
    ],
)
def test_the_row_decides_then_its_verifier_then_its_dataset_then_the_unnamed(columns, source, expected) -> None:
    """A row of mathematics that the coder teaches is learned wrong, and the reward shows it weeks later."""
    assert teachers(*SEVERAL).of(columns, source) == expected


def test_a_row_without_a_teacher_of_its_own_has_none_where_all_are_named() -> None:
    """It is trained by its reward alone."""
    assert teachers("math:BIG1").of({"dataset": "gsm8k"}, "x.jsonl") == -1


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("{prompt}\nHint: {solution}", {"prompt": "1+{1}?", "solution": "{prompt}"}, "1+{1}?\nHint: {prompt}"),
        (r"\boxed{{{answer}}} {prompt}", {"prompt": "q", "answer": "2"}, r"\boxed{2} q"),
        ("{prompt}{prompt}", {"prompt": "q"}, "qq"),
    ],
)
def test_a_template_is_filled_in_once(text, values, expected) -> None:
    """A completion that holds a placeholder must not read the row's columns."""
    assert TeacherTemplate.read(text).text(values) == expected


@pytest.fixture
def problems(tmp_path):
    """Of rows with these columns, under these settings."""

    def of(*rows: dict, **settings: object) -> list[str]:
        given = [{"prompt": str(n), "ground_truth": "1", "dataset": "math", **row} for n, row in enumerate(rows)]
        (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, given)))
        data = {
            "dataset_mixer_list": [str(tmp_path / "sums.jsonl"), "1.0"],
            "dataset_local_cache_dir": str(tmp_path / "cache"),
        }
        return read_inputs(from_values(data | settings))[1]

    return of


def test_a_row_that_names_an_unknown_teacher_is_found_before_the_start(problems) -> None:
    """Each mistake once, with the first row's place and the ways out of it."""
    (problem,) = problems(
        {"teacher": "math"}, {"teacher": "gpt"}, {"teacher": "gpt"}, teacher_model_name_or_path="math:BIG"
    )
    assert "sums.jsonl:2: column teacher has 'gpt', which is no teacher of the run (math)" in problem
    assert "add it to teacher_model_name_or_path as NAME:MODEL" in problem and problem.endswith("(1 more such rows)")
    (problem,) = problems({"teacher": 3}, teacher_model_name_or_path="BIG")
    assert "column teacher has 3, which is no teacher of the run (none has a name)" in problem


def test_a_teacher_that_no_row_asks_for_is_found_before_the_start(problems) -> None:
    """It would hold GPUs for nothing, and its rows, misspelt, would go untaught."""
    (problem,) = problems({}, {"dataset": "gsm8k"}, teacher_model_name_or_path="maths:BIG,sums:BIG2")
    assert (
        problem
        == "teacher_model_name_or_path=maths:BIG: no row asks for maths; rows have the names math, sums.jsonl, sums, gsm8k"
    )
    (problem,) = problems({}, {}, teacher_model_name_or_path="math:BIG,BIG2")
    assert problem.startswith("teacher_model_name_or_path=BIG2: every row has another teacher")
    assert problems({}, {"dataset": "gsm8k"}, teacher_model_name_or_path="math:BIG,BIG2") == []
    assert problems({}, {}, teacher_model_name_or_path="BIG") == []


def test_a_placeholder_that_is_no_column_is_found_before_the_start(problems) -> None:
    """The run would end at its first group."""
    settings = {
        "teacher_model_name_or_path": "self",
        "teacher_prompt_template": "{prompt} {solution} {answer} {feedback}",
    }
    (problem,) = problems({"solutions": "4"}, **settings)
    assert "has {solution}, which no row has; expected {prompt}, {answer}, {feedback} or a column: " in problem
    assert "ground_truth, dataset, solutions" in problem
    assert problems({"solution": "4"}, {}, **settings) == []
    # The rules of the settings have said what is wrong with these.
    assert problems({}, **settings | {"teacher_prompt_template": "{prompt} {x.y}"}) == []


def test_what_a_template_cannot_do_is_remarked() -> None:
    """GSM8K has a column answer; and prompts that are always too long teach nothing, silently."""
    settings = {
        "teacher_model_name_or_path": "self",
        "teacher_prompt_template": "{prompt}: {answer}",
        "pack_length": 700,
    }

    def said(longest: int, columns: tuple[str, ...] = (), **more: object) -> list[str]:
        own = from_values({"response_length": 256, "max_prompt_token_length": 100, **settings, **more})
        return list(template_remarks(own, columns, longest=longest, limit=600, num_tokens=len))

    assert said(86) == []
    (remark,) = said(87)
    assert remark == (
        "a teacher reads up to 600 tokens (pack_length=700, its positions), and a prompt of 87 tokens, 258 of the template with an "
        "answer and a completion of 256 can have 601: what is longer is not taught (distillation/untaught/too_long)"
    )
    (remark,) = said(20, ("answer", "level"))
    assert remark == (
        "teacher_prompt_template: {answer} is another completion of the group, not the column answer; to show that, rename it"
    )
    assert said(99, ("answer",), teacher_prompt_template="{prompt} {level}") == []
