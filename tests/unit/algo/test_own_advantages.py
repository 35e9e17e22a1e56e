"""A user's advantages: what their function is given, what it may return, and what is wrong with it before a run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mgrpo.algo import check_advantages, load_advantages
from mgrpo.algo.training_samples import train_samples
from mgrpo.config.algorithm import Algorithm
from tests import builders

NAN = float("nan")
PAGE = Path(__file__).parents[3] / "docs" / "howto" / "own_advantage.md"


def from_page(file: str, folder: Path) -> Path:
    """A file of the page that teaches it, in `folder`."""
    (text,) = re.findall(rf"```python\n(# {file}\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / file).write_text(text, encoding="utf-8")
    return folder / file


@pytest.fixture
def rloo(tmp_path):
    return load_advantages(Algorithm(advantage_normalization_type=f"{from_page('rloo.py', tmp_path)}:rloo"))


def samples_of(groups, function=None, **settings):
    return train_samples(groups, normalization="rloo", ddof=0, eps=1e-8, function=function, **settings)


def advantages_of(samples) -> list[float]:
    return [float(np.float32(sample.advantage)) for sample in samples]


def test_rloo_as_a_function_is_the_named_one(rloo):
    """Also without a score, in a group of which nothing or one is scored, and beside groups that are left out."""
    rng = np.random.default_rng(0)
    groups = [builders.scored_group(rng.integers(0, 2, 8).astype(float).tolist()) for _ in range(20)]
    groups += [builders.scored_group([*rng.normal(size=6).tolist(), NAN, NAN]) for _ in range(20)]
    groups += [builders.scored_group([NAN] * 8), builders.scored_group([2.0] + [NAN] * 7)]
    dropped = [builders.scored_group([1.0] * 8)]
    named, own = (samples_of(groups, function, dropped=dropped) for function in (None, rloo))
    assert advantages_of(own) == advantages_of(named)
    assert [sample.loss_mask.tolist() for sample in own] == [sample.loss_mask.tolist() for sample in named]
    assert all(sample.token_advantages is None for sample in own)


def test_it_is_given_what_its_record_says():
    """A user writes his formula from that page."""
    turns = (builders.turn(0, 2, reward=0.5), builders.turn(3, 5))
    played = builders.completion(
        [7, 8, 9, 4, 5], version=3, trajectory=builders.trajectory("11011", turns=turns), finish_reason="length"
    )
    group = builders.scored_group(
        [1.0, NAN],
        completions=[played, builders.completion(2)],
        parts=[{"right": 1.0, "short": 0.0}, {"right": NAN}],
        of=builders.prompt(id=(1, 7)),
    )
    seen = []

    def function(groups):
        seen.extend(groups)
        return [np.zeros(len(group.rewards)) for group in groups]

    samples_of([group], function, dropped=[builders.scored_group([1.0])])
    first, second = seen
    assert first.prompt_id == (1, 7) and first.is_trained and not second.is_trained
    np.testing.assert_array_equal(first.rewards, [1.0, NAN])
    assert first.rewards.dtype == np.float64
    np.testing.assert_array_equal(first.parts["right"], [1.0, NAN])
    np.testing.assert_array_equal(first.parts["short"], [0.0, NAN])
    assert first.lengths.tolist() == [5, 2] and first.is_truncated.tolist() == [True, False]
    assert first.is_sampled[0].tolist() == [True, True, False, True, True]
    assert first.tokens[0].tolist() == [7, 8, 9, 4, 5] and first.policy_versions[0].tolist() == [3, 3, -1, 3, 3]
    assert first.logprobs[0].tolist() == [-1.0, -1.0, 0.0, -1.0, -1.0]
    assert first.turns == (turns, ())
    with pytest.raises(ValueError, match="read-only"):
        first.tokens[0][:] = 0


def test_tokens_may_have_advantages_of_their_own(tmp_path):
    """The example of the page gives each turn the reward of its step; completions without turns have 0."""
    function = load_advantages(Algorithm(advantage_normalization_type=f"{from_page('steps.py', tmp_path)}:by_step"))
    turns = (builders.turn(0, 2, reward=3.0), builders.turn(3, 5, reward=1.0))
    played = builders.completion(5, trajectory=builders.trajectory("11011", turns=turns))
    group = builders.scored_group([4.0, 0.0], completions=[played, builders.completion(2)])
    first, second = samples_of([group], function)
    assert first.token_advantages.tolist() == [1.0, 1.0, 0.0, -1.0, -1.0] and first.advantage == 0.0
    assert first.token_advantages.dtype == np.float32
    assert second.token_advantages.tolist() == [0.0, 0.0]


def test_groups_may_differ_in_whether_tokens_have_their_own():
    """A step whose first group has one number a completion would lose those of the second."""
    groups = [builders.scored_group([1.0, NAN]), builders.scored_group([0.0, 1.0])]

    def function(groups):
        return [[2, 3], [np.array([1.0, -1.0]), np.array([4.0, 6.0])]]

    found = samples_of(groups, function)
    assert [sample.token_advantages.tolist() for sample in found] == [[2, 2], [0, 0], [1, -1], [4, 6]]
    assert advantages_of(found) == [2.0, 0.0, 0.0, 5.0]


def test_a_completion_without_tokens_has_one_that_is_not_trained():
    """Its array is empty, and its sample is not."""
    group = builders.scored_group([1.0, 0.0], completions=[builders.completion(0), builders.completion(2)])
    empty, other = samples_of([group], lambda groups: [[np.zeros(0), np.array([1.0, 2.0])]])
    assert empty.token_advantages.tolist() == [0.0] and not empty.loss_mask.any()
    assert other.token_advantages.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None for 2 groups, expected a list of one for each"),
        ([[1.0, 2.0]], "returned a list of 1 for 2 groups"),
        (
            [[1.0, 2.0], np.zeros(3)],
            r"returned for group 1, prompt \(0, 0\), an array of float64 of shape \[3\], expected an array \[completions\], or "
            r"a list of arrays \[length\], one for each completion: 2 of lengths \[2, 2\]",
        ),
        ([[1.0, 2.0], 3.0], r"for group 1, prompt \(0, 0\), 3.0, expected"),
        ([[1.0, 2.0], [np.zeros(2), np.zeros(3)]], r"an array of float64 of shape \[3\] for completion 1"),
        ([[1.0, 2.0], [np.zeros(2), 3.0]], "3.0 for completion 1"),
        ([[1.0, 2.0], ["a", 1.0]], "'a' for completion 0"),
        ([[1.0, 2.0], [True, 1.0]], "True for completion 0"),
        ([[1.0, 2.0], [1.0, NAN]], "the advantage nan for completion 1, expected numbers that are finite in float32"),
        ([[1.0, 2.0], [1e39, 0.0]], r"the advantage 1e\+39 for completion 0, expected numbers"),
        ([[1.0, 2.0], [np.zeros(2), np.array([0.0, np.inf])]], "the advantage inf for completion 1"),
        ([[1.0, 2.0], np.array([np.inf, 1.0], np.float16)], "the advantage inf for completion 0"),
        ([[1.0, 2.0], [[[1.0], [2.0, 3.0]], [1.0, 2.0]]], r"a list of 2 for completion 0, expected an array"),
    ],
)
def test_what_it_returns_by_mistake_is_named(returned, words):
    """Otherwise it is an error of a pack's, far from the user's file, or a gradient that is not finite."""
    groups = [builders.scored_group([1.0, 0.0]), builders.scored_group([0.0, 1.0])]
    with pytest.raises(ValueError, match=f"^advantage_normalization_type: .*<lambda> .*{words}"):
        samples_of(groups, lambda groups: returned)


def test_what_it_raises_is_noted():
    """A KeyError alone would not say whose it is."""
    with pytest.raises(ZeroDivisionError) as caught:
        samples_of([builders.scored_group([1.0, 0.0])], lambda groups: 1 // 0)
    (note,) = caught.value.__notes__
    assert note.startswith("raised by advantage_normalization_type: ") and note.endswith("given 1 groups")


def test_with_teachers_alone_it_is_not_called():
    """Rewards are not trained on."""
    samples = samples_of([builders.scored_group([1.0, 0.0])], lambda groups: 1 // 0, distillation_only=True)
    assert advantages_of(samples) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("no_such_module:f", "cannot be imported: there is no module no_such_module; put its folder on PYTHONPATH"),
        ("{folder}/other.py:f", "there is no file {folder}/other.py"),
        ("{folder}/mine.py:good", ""),
        ("{folder}/mine.py:god", "god does not exist; functions there: good"),
        ("{folder}/mine.py:EPS", "EPS is not a function"),
        ("{folder}/mine.py:two", "cannot be called with one argument: missing a required argument: 'eps'"),
        ("{folder}/mine.py:none", "cannot be called with one argument: too many positional arguments"),
    ],
)
def test_what_is_wrong_with_a_name_is_one_sentence(tmp_path, word, words):
    """Found after the engines have started it would cost minutes."""
    (tmp_path / "mine.py").write_text(
        "EPS = 1\ndef good(groups): ...\ndef two(groups, eps): ...\ndef none(): ...\n", encoding="utf-8"
    )
    config = Algorithm(advantage_normalization_type=word.format(folder=tmp_path))
    if not words:
        assert load_advantages(config) is load_advantages(config) is not None
        return
    with pytest.raises(ValueError) as caught:
        load_advantages(config)
    problem = str(caught.value)
    assert problem.startswith("advantage_normalization_type") and words.format(folder=tmp_path) in problem


@pytest.mark.parametrize(("given", "words"), [(3, "3 is not a function"), (lambda: 0, "with one argument")])
def test_what_is_wrong_with_an_object_is_one_sentence(given, words):
    """The same for `mgrpo.train(..., advantage_fn=...)`."""
    with pytest.raises(ValueError, match=f"^advantage_normalization_type: advantage_fn=.*{words}"):
        check_advantages(given)


def test_a_named_estimator_is_no_function():
    assert load_advantages(Algorithm(advantage_normalization_type="rloo")) is None
