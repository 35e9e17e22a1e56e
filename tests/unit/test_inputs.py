"""What a run says of its data and rewards before it starts anything."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from mgrpo.config.load import from_values
from mgrpo.inputs import read_inputs
from mgrpo.rewards import catalog

MODULE = """
from mgrpo.rewards.verifier import Answer, Verifier


class Ending(Verifier):
    name = "ending"

    def score(self, answer: Answer) -> float:
        return float(answer.completion.endswith(answer.ground_truth))
"""


@pytest.fixture
def make(tmp_path):
    """A configuration whose training rows name these verifiers."""

    def config(*verifiers: str, **values):
        rows = [
            json.dumps({"prompt": f"{n}", "ground_truth": "1", "dataset": name}) for n, name in enumerate(verifiers)
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        data = {"dataset_mixer_list": [str(tmp_path / "rows.jsonl"), "1.0"]}
        return from_values({**data, "dataset_local_cache_dir": str(tmp_path / "cache"), **values})

    return config


def test_an_unknown_verifier_is_named_with_its_place_and_its_neighbours(make):
    """The alternative is a step whose rewards are all zero."""
    inputs, problems = read_inputs(make("math", "gsm8"))
    assert len(inputs.train) == 2
    (problem,) = problems
    assert "unknown verifier 'gsm8'; did you mean gsm8k" in problem and "rows.jsonl:2" in problem


def test_a_remapped_name_need_not_exist_and_its_replacement_must(make):
    """Rows of Open Instruct name verifiers that a run wants to score by another."""
    config = make("Theirs", "math", remap_verifier="theirs=gsm8k")
    inputs, problems = read_inputs(config)
    assert problems == []
    assert inputs.verifiers(config) == ["gsm8k", "math"]
    _, (problem,) = read_inputs(make("math", remap_verifier="math=maths"))
    assert "unknown verifier 'maths'" in problem


def test_verifiers_of_the_users_own_modules_are_found_by_name(make, tmp_path, monkeypatch):
    """Ten lines of one's own must do."""
    monkeypatch.setattr(catalog, "_added", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_own_verifiers.py").write_text(MODULE)
    assert read_inputs(make("ending", verifier_modules=["my_own_verifiers"]))[1] == []
    del sys.modules["my_own_verifiers"]
    _, problems = read_inputs(make("math", verifier_modules=["no_such_module"]))
    assert "no_such_module cannot be imported" in problems[0]


def test_a_judge_without_a_model_is_a_problem_once(make, monkeypatch):
    """Found at step 1, every judged completion would be without a score."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HOSTED_VLLM_API_BASE", "RUBRIC_JUDGE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    _, problems = read_inputs(make("general-quality", "general-safety"))
    assert len([problem for problem in problems if "llm_judge_model" in problem]) == 1


def test_bad_rows_and_a_bad_template_are_said_together(make, tmp_path):
    """One start, one list."""
    config = make("math", chat_template_name="tulus")
    (tmp_path / "rows.jsonl").write_text('{"prompt": 5}\n')
    inputs, problems = read_inputs(config)
    assert inputs is None
    assert "tulu" in problems[0] and "rows.jsonl:1" in problems[1]


def test_reward_functions_need_no_verifier_in_the_rows(make, tmp_path):
    """TRL's data have columns of their own."""
    (tmp_path / "reward.py").write_text("def f(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    config = make(reward_funcs=[f"{tmp_path}/reward.py:f"])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "solution": "2"}\n')
    inputs, problems = read_inputs(config)
    assert problems == [] and inputs.verifiers(config) == []
    wrong = dataclasses.replace(config, reward=dataclasses.replace(config.reward, reward_funcs=("accuracy_rewards",)))
    assert "did you mean" in read_inputs(wrong)[1][0]


def test_a_function_that_asks_for_a_column_the_data_lack_is_found_before_the_start(make, tmp_path):
    """Held-out rows are looked at last of all, after a step, an engine and a night."""
    (tmp_path / "reward.py").write_text("def f(completions, solution):\n    return [0.0] * len(completions)\n")
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1"}\n')
    config = make(
        reward_funcs=[f"{tmp_path}/reward.py:f"], dataset_mixer_eval_list=[str(tmp_path / "held_out.jsonl"), "1.0"]
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "solution": "2"}\n')
    (problem,) = read_inputs(config)[1]
    assert "asks for solution" in problem
