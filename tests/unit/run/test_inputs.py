"""What a run says of its data and rewards before it starts anything."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from mgrpo.moving import from_values
from mgrpo.rewards import registry
from mgrpo.run.inputs.reading import read_inputs
from mgrpo.run.inputs.row_labels import looked_at

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


def test_labels_that_a_verifier_cannot_read_are_found_before_the_start(make, tmp_path):
    """Each would be a row without a score in every step of the run, which then trains nothing."""
    config = make(*["Theirs"] * 3, "math", remap_verifier="theirs=integer")
    rows = (tmp_path / "rows.jsonl").read_text().replace('"ground_truth": "1"', '"ground_truth": "thirty"', 2)
    (tmp_path / "rows.jsonl").write_text(rows)
    _, (problem,) = read_inputs(config)
    assert problem == (
        f"{tmp_path}/rows.jsonl:1: the verifier integer cannot read the label: ground_truth='thirty' is not an integer; "
        "write an int or a string of digits; so it is with 2 labels"
    )


def test_what_a_verifier_leaves_out_of_labels_is_noted_once(make, tmp_path):
    """The label -5 takes 5 in SQuAD's normal form; a user who does not know it finds it out after a week."""
    config = make(*["flan"] * 3)
    rows = (tmp_path / "rows.jsonl").read_text().replace('"ground_truth": "1"', '"ground_truth": "-5"', 2)
    (tmp_path / "rows.jsonl").write_text(rows)
    inputs, problems = read_inputs(config)
    assert problems == []
    (note,) = inputs.notes(config)
    assert note.startswith("verifier flan: 2 of 3 labels lose a sign") and note.endswith(
        f"the first is '-5' ({tmp_path}/rows.jsonl:1)"
    )


def test_labels_are_looked_at_for_a_bounded_time():
    """Of many millions the start of a run cannot wait."""
    found = looked_at(iter([("a:1", "integer", "thirty")] * 2), str, limit_s=-1)
    assert found == ([], ["the labels after a:1 were not looked at, because that takes more than -1 s"])


def test_rows_are_read_for_verifiers_that_look_at_labels(make, tmp_path, monkeypatch):
    """Each start would decode all rows of a large data set again for nothing."""
    monkeypatch.setattr(registry, "_added", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_unlooking_verifiers.py").write_text(MODULE)
    seen = []
    monkeypatch.setattr("mgrpo.run.inputs.reading.looked_at", lambda labels, of: (seen.append([*labels]), ([], []))[1])
    values = {"verifier_modules": ["my_unlooking_verifiers"], "remap_verifier": "theirs=ending"}
    assert read_inputs(make("ending", "Theirs", **values))[1] == []
    assert read_inputs(make("Theirs", "Math", **values))[1] == []
    assert [[name for _, name, _ in labels] for labels in seen] == [[], ["Theirs", "Math"]]


def test_verifiers_of_the_users_own_modules_are_found_by_name(make, tmp_path, monkeypatch):
    """Ten lines of one's own must do."""
    monkeypatch.setattr(registry, "_added", {})
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


def test_a_weight_of_a_verifier_that_no_row_asks_for_is_refused(make):
    """A typing mistake, and the weight is 1 all the same."""
    _, problems = read_inputs(make("gsm8k", "Math", verifier_weights=["mth=2", "GSM8K=3"]))
    assert problems == ["verifier_weights=mth=2: no row asks for mth; rows ask for math, gsm8k"]
    remapped = {"remap_verifier": "math=integer"}
    assert read_inputs(make("gsm8k", "Math", verifier_weights=["integer=2"], **remapped))[1] == []
    (problem,) = read_inputs(make("gsm8k", "Math", verifier_weights=["math=2"], **remapped))[1]
    assert problem.endswith("rows ask for gsm8k, integer (after remap_verifier=math=integer)")
    _, problems = read_inputs(make("math", verifier_weights=["math=2", "math=1"]))
    assert "weighs math twice" in problems[0]


def test_a_replacement_of_a_verifier_that_no_row_names_is_refused(make):
    """The rows would go on asking for the one that was to be replaced."""
    _, problems = read_inputs(make("gsm8k", "math", remap_verifier="maths=integer"))
    assert problems == ["remap_verifier=maths=integer: no row asks for maths; rows ask for math, gsm8k"]


def test_open_instructs_preset_reads_answers_as_open_instruct_does(make):
    """Its runs would lose the rewards of answers that it accepts; rows without mathematics must not be refused for it."""
    config = make("math", "gsm8k", preset="open_instruct_main")
    inputs, problems = read_inputs(config)
    assert problems == [] and inputs.verifiers(config) == ["gsm8k", "math_open_instruct"]
    assert read_inputs(make("gsm8k", preset="open_instruct_main"))[1] == []
    config = make("math", preset="open_instruct_main", remap_verifier="math=strict_math")
    assert read_inputs(config)[0].verifiers(config) == ["strict_math"]


def test_weights_and_replacements_are_no_matter_without_verifiers(make, tmp_path):
    """Functions are what counts; a note says so."""
    (tmp_path / "reward.py").write_text("def f(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    idle = {"verifier_weights": ["mth=2"], "remap_verifier": "nosuch=integer"}
    assert read_inputs(make("math", reward_funcs=[f"{tmp_path}/reward.py:f"], **idle))[1] == []
    assert read_inputs(make("math", apply_verifiable_reward=False, **idle))[1] == []


def test_an_evaluation_takes_the_weights_of_the_training(make, tmp_path):
    """The same configuration is used for both, and held-out rows need not ask for every verifier."""
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1", "ground_truth": "2", "dataset": "integer"}\n')
    held_out = {"dataset_mixer_list": [], "dataset_mixer_eval_list": [str(tmp_path / "held_out.jsonl"), "1.0"]}
    assert read_inputs(make(verifier_weights=["math=2"], remap_verifier="theirs=gsm8k", **held_out))[1] == []
    (problem,) = read_inputs(make(verifier_weights=["mth=2"], **held_out))[1]
    assert "verifier_weights=mth=2: unknown verifier 'mth'; did you mean math" in problem


def test_rubrics_evolve_where_rows_have_some(make, monkeypatch):
    """With nothing to evolve, a run would pay for a judge that nobody asks, or do nothing of what was wanted."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    own = {"apply_evolving_rubric_reward": True}
    _, (problem,) = read_inputs(make("math", "gsm8k", **own))
    assert problem == (
        "apply_evolving_rubric_reward=true: no training row asks for the verifier rubric, of which rubrics are labels; rows ask "
        "for gsm8k, math; name it in the rows, or by remap_verifier"
    )
    problems = read_inputs(make("math", "general_rubric", remap_verifier="general_rubric=rubric", **own))[1]
    assert len(problems) == 1 and "the verifier rubric cannot read the label" in problems[0]
    assert read_inputs(make("math"))[1] == []


@pytest.mark.parametrize("setting", ["dataset_local_cache_dir", "rollouts_save_path", "cache_evolving_rubric_data_dir"])
def test_a_folder_that_cannot_be_written_to_is_a_problem_before_the_start(make, tmp_path, setting):
    """Traces fail after the engines have started; data that are not kept are prepared again by every run."""
    (tmp_path / "file").write_text("")
    for path, why in (
        ("file", "it is a file"),
        ("file/inside", "Not a directory"),
        ("/proc/mgrpo", ""),
        ("x" * 300, ""),
    ):
        folder = str(tmp_path / path)
        _, (problem,) = read_inputs(make("math", save_traces=True, **{setting: folder}))
        assert problem.startswith(f"{setting}={folder} cannot be written to (") and why in problem
        _, problems = read_inputs(make("maths", save_traces=True, **{setting: folder}))
        assert len(problems) == 2
    inputs, problems = read_inputs(make("math", save_traces=True, **{setting: str(tmp_path / "new" / "folder")}))
    assert inputs and problems == []
    assert read_inputs(make("math", rollouts_save_path="/proc/mgrpo"))[1] == []


def test_prepared_data_may_be_read_only(make, tmp_path, monkeypatch):
    """A cluster's data are prepared once, and mounted so that no run can damage them."""
    (tmp_path / "shared" / "prompts-1").mkdir(parents=True)
    (tmp_path / "shared" / "prompts-1" / "manifest.json").write_text("{}")

    def refuse(dir: str) -> None:
        raise PermissionError(f"no permission to write to {dir}")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert read_inputs(make("math", dataset_local_cache_dir=str(tmp_path / "shared")))[1] == []
    _, (problem,) = read_inputs(make("math", dataset_local_cache_dir=str(tmp_path / "empty")))
    assert "no permission" in problem


def test_held_out_rows_may_be_the_callers(make, tmp_path):
    """`mgrpo.train(eval_dataset=rows)`: they take the place of the mix that is named, and are checked like it."""
    named = make("math", dataset_mixer_eval_list=[str(tmp_path / "not_there.jsonl"), "1.0"])
    rows = [{"prompt": f"{n}+1=", "ground_truth": f"{n + 1}", "dataset": "integer"} for n in range(3)]
    inputs, problems = read_inputs(named, eval_dataset=iter(rows))
    assert problems == [] and (len(inputs.train), len(inputs.held_out)) == (1, 3)
    assert inputs.verifiers(named) == ["integer", "math"]
    _, (problem,) = read_inputs(make("math"), eval_dataset=[*rows, {"prompt": "a", "dataset": "integer"}])
    assert "eval_dataset" in problem and "ground_truth" in problem
    _, (problem,) = read_inputs(make("math"), eval_dataset=[{**rows[0], "dataset": "integre"}])
    assert "unknown verifier 'integre'; did you mean integer" in problem and "eval_dataset" in problem
