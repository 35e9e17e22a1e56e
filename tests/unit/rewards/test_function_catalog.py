"""Reward functions by their words on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mgrpo.rewards.builtin_functions import BUILTIN
from mgrpo.rewards.function_catalog import check_functions, load_functions

ROOT = Path(__file__).parents[3]
SOURCE = """
from dataclasses import dataclass

runs = []

@dataclass
class Thing:
    value: float = 2.0

def double(completions, **kwargs):
    return [Thing().value * len(text) for text in completions]

def half(completions, **kwargs):
    runs.append(1)
    return [len(text) / 2 for text in completions]

NUMBER = 3
"""


def _load(*words: object) -> list:
    return load_functions(words, max_completion_length=10)


def test_a_file_is_loaded_from_anywhere_and_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two functions of a file share its state; neither its folder nor the working directory reaches sys.path."""
    (tmp_path / "own.py").write_text(SOURCE)
    before = list(sys.path)
    double, half = _load(f"{tmp_path}/own.py:double", f"{tmp_path}/own.py:half")
    assert (double(["ab"]), half(["ab"])) == ([4.0], [1.0])
    monkeypatch.chdir(tmp_path)
    assert _load("own.py:half")[0] is half
    assert sys.path == before


def test_a_module_on_the_path_is_found_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How TRL's command line names functions."""
    (tmp_path / "own_package_of_rewards").mkdir()
    (tmp_path / "own_package_of_rewards" / "scores.py").write_text(SOURCE)
    assert "no module own_package_of_rewards" in check_functions(["own_package_of_rewards.scores.double"])[0]
    monkeypatch.syspath_prepend(tmp_path)
    (double,) = _load("own_package_of_rewards.scores.double")
    assert double(["ab"]) == [4.0]


def test_the_six_of_trl_are_known_by_name() -> None:
    """The words of TRL's scripts must go on working."""
    assert len(BUILTIN) == 6 and check_functions(list(BUILTIN)) == []
    (punishment,) = _load("get_soft_overlong_punishment")
    assert punishment([[1] * 9]) == [-0.5]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("acuracy_reward", "is not the name of a reward function; did you mean accuracy_reward"),
        ("format", "format is not the name of a reward function; did you mean think_format_reward?"),
        ("cosine", "cosine is not the name of a reward function; did you mean get_cosine_scaled_reward?"),
        ("12", "is not the name of a reward function; give one of accuracy_reward"),
        ("https://x/y", "is not the name of a reward function; give one of"),
        ("nowhere.py:f", "there is no file"),
        ("own.py", "names a file but no function in it; write own.py:function"),
        ("own.py:doubel", "doubel does not exist; functions there: double"),
        ("own.py:NUMBER", "NUMBER is not a function"),
        ("own.py:Thing", "Thing is not a function"),
        ("json.dmps", "dmps does not exist; functions there: dumps"),
        ("broken.py:f", "cannot be imported: ZeroDivisionError"),
        ("leaves.py:f", "cannot be imported: SystemExit"),
        ("needs.py:f", "there is no module not_installed_anywhere"),
        ("folder", "reward model folder: config.json cannot be read"),
    ],
)
def test_a_word_that_names_nothing_says_what_would(
    word: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before any engine starts, beside all other problems of the configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    (tmp_path / "needs.py").write_text("import not_installed_anywhere")
    (tmp_path / "folder").mkdir()
    (problem,) = check_functions(["think_format_reward", word])
    assert problem.startswith("reward_funcs: ") and found in problem
    with pytest.raises(ValueError, match="reward_funcs: "):
        _load(word)


def test_functions_may_stand_among_words() -> None:
    """TRL's reward_funcs is a list of both."""
    own = lambda completions: [1.0]  # noqa: E731
    assert _load("think_format_reward", own)[1] is own
    number, kind = check_functions([3, own, Path])
    assert number.startswith("reward_funcs: 3 is not a function") and "Path" in kind


def test_the_example_of_the_documentation_is_found() -> None:
    """The worked example is what newcomers copy."""
    (closeness,) = _load(f"{ROOT}/examples/own_reward/reward.py:closeness")
    texts = ["33", "32", "35", "", "thirty", "-33", "9" * 5000]
    assert closeness(completions=texts, ground_truth=["33"] * 7, prompts=[]) == [1, 1 / 2, 1 / 3, 0, 0, 0, 0]


def test_all_problems_are_reported_at_once() -> None:
    """One restart for each typo is one too many."""
    problems = check_functions(["a_b", "c_d", "nowhere.py:f"])
    assert len(problems) == 3
    with pytest.raises(ValueError, match=r"a_b is not the .*; reward_funcs: c_d is not the"):
        _load("a_b", "c_d")
