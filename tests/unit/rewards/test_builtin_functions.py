"""TRL's six reward functions on hand-worked cases and against the formulas that TRL documents."""

from __future__ import annotations

import itertools
import math
import random
import re
import time

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards.builtin_functions import (
    BUILTIN,
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from mgrpo.rewards.scorer import Scorer
from mgrpo.rewards.verifier import Item

THIRD = r"\frac{1}{3}"


class FakeScorer:
    """Says that an answer is right where it is the solution, and has no verdict on "hang"."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def verify_many(self, items: list[Item]) -> list[float]:
        self.items += items
        answers = [item.answer for item in items]
        return [math.nan if a.completion == "hang" else float(a.completion == a.ground_truth) for a in answers]


def _messages(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
        (r"My answer is \boxed{\frac{1}{3}}", THIRD, 1.0),
        (r"My answer is \boxed{\frac{1}{2}}", THIRD, 0.0),
        (r"My answer is \boxed{\frac{2}{6}}", "$1/3$", 1.0),
        (r"$7$ and \boxed{42}", "42", 1.0),
        (r"the final answer is $x=5$", "$5$", 1.0),
        # Two boxes are two answers.
        (r"\boxed{7} and \boxed{42}", "42", 0.0),
        # Only LaTeX that is boxed or called the answer is read in a completion.
        ("42", "42", 0.0),
        ("$42$", "42", 0.0),
        ("", "42", 0.0),
        (r"\boxed{42}", 42, 1.0),
        # Nothing that could be read in the solution.
        (r"\boxed{42}", "", None),
        (r"\boxed{42}", "no mathematics", None),
        (r"\boxed{42}", None, None),
    ],
)
def test_accuracy_is_mathematical_equality(completion: str, solution: object, reward: float | None) -> None:
    """The most used reward of TRL's: another verdict trains another task."""
    assert accuracy_reward(_messages(completion), [solution], log_extra=None, prompts=["x"]) == [reward]
    assert accuracy_reward([completion], [solution]) == [reward]


def test_an_answer_that_takes_too_long_has_no_score() -> None:
    """TRL computes it in the trainer's own process; here the worker is killed, and the other answers are scored."""
    scorer = Scorer(Reward(verifier_timeout=1.0))
    try:
        tower = r"\boxed{9^{9^{9^9}}}"
        rewards = BUILTIN["accuracy_reward"](100, scorer)([r"\boxed{7}", tower, r"\boxed{8}"], ["7", "7", "7"])
    finally:
        scorer.close()
    assert rewards == [1.0, None, 0.0]


def test_reasoning_accuracy_reads_what_follows_the_reasoning() -> None:
    """A right number in unfinished reasoning must not be paid for; no end of reasoning is 0, not "no score"."""
    scorer = FakeScorer()
    function = BUILTIN["reasoning_accuracy_reward"](100, scorer)
    texts = ["<think>8</think>7", "<think>7", "a</think>b</think>7", "<think>x</think>hang", "x</think>8"]
    assert function(_messages(*texts), ["7"] * 5) == [1.0, 0.0, 1.0, None, 0.0]
    assert [item.answer.completion for item in scorer.items] == ["7", "7", "hang", "8"]
    # The first delimiter that the text holds decides, in the order given, and where it stands last.
    texts = ["a|b#7", "7#8|", "a#b#7", "7"]
    assert function(texts, ["7"] * 4, reasoning_delimiters=["#", "|"]) == [1.0, 0.0, 1.0, 0.0]


def test_reasoning_accuracy_stands_on_the_same_mathematics() -> None:
    """TRL's own three examples."""
    texts = [
        f"<think> r </think> so \\boxed{{{THIRD}}}",
        "<think> r </think> \\boxed{2}",
        f"<think> \\boxed{{{THIRD}}}",
    ]
    assert reasoning_accuracy_reward(_messages(*texts), [THIRD] * 3) == [1.0, 0.0, 0.0]


def test_accuracy_functions_log_the_solutions() -> None:
    """The table of samples shows what an answer was compared with."""
    logged: dict[str, list] = {}
    for name in ("accuracy_reward", "reasoning_accuracy_reward"):
        BUILTIN[name](100, FakeScorer())(["1", "2"], ["1", "1"], log_extra=logged.__setitem__)
        assert logged.popitem() == ("solution", ["1", "1"])


THINK_PIECES = ["<think>", "</think>", "\n", "a", "<think>\n", "</thin"]


def test_the_think_format_is_the_language_of_trls_pattern() -> None:
    """Its pattern is the oracle, on every text of up to five pieces."""
    oracle = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
    texts = ["".join(pieces) for size in range(6) for pieces in itertools.product(THINK_PIECES, repeat=size)]
    expected = [float(oracle.match(text) is not None) for text in texts]
    assert think_format_reward(_messages(*texts), prompts=[]) == expected
    assert 10 < sum(expected) < len(texts) / 2


def test_the_think_format_is_linear_in_hostile_text() -> None:
    """It runs on rank 0, where nothing stops it."""
    began = time.process_time()
    texts = ["<think>" * 100_000, "<think>" + "</think>" * 100_000, "<think>" + "<thin" * 100_000]
    assert think_format_reward(texts) == [0.0, 1.0, 0.0]
    assert time.process_time() - began < 5


@pytest.mark.parametrize(("length", "reward"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)])
def test_overlong_completions_are_punished_softly(length: int, reward: float) -> None:
    """DAPO's equation 13 with 100 tokens, 20 of them punished."""
    (found,) = get_soft_overlong_punishment(100, 20)(completion_ids=[[1] * length], prompts=["x"])
    assert found == pytest.approx(reward)
    (step,) = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=0)([[1] * length])
    assert step == (-1.0 if length > 100 else 0.0)


@pytest.mark.parametrize(
    ("ids", "size", "reward"),
    [
        ([1, 2, 3, 4], 2, 0.0),
        ([5, 5, 5, 5, 5], 2, -0.75),  # 4 bigrams, 1 of a kind
        ([1, 2, 1, 2, 1], 2, -0.5),
        ([1, 2, 3, 1, 2, 3], 3, -0.25),
        ([1, 1], 3, 0.0),
        ([], 1, 0.0),
        ([3, 3, 3], 1, -2 / 3),
    ],
)
def test_repeated_ngrams_cost_their_share(ids: list[int], size: int, reward: float) -> None:
    """1 - unique / all, worked by hand."""
    assert get_repetition_penalty_reward(ngram_size=size)([ids]) == [pytest.approx(reward)]
    assert get_repetition_penalty_reward(size, -3.0)(completion_ids=[ids], prompts=["x"]) == [pytest.approx(3 * reward)]


def test_the_cosine_scales_accuracy_by_length() -> None:
    """v_min + (v_max - v_min)(1 + cos(pi min(n / L, 1))) / 2, swapped for wrong answers, None without a verdict."""
    rng = random.Random(0)
    lengths = [0, 50, 100, 150, *(rng.randrange(200) for _ in range(20))]
    for values in ((-1.0, -0.5, 0.5, 1.0), (-3.0, -0.1, 0.2, 4.0)):
        function = get_cosine_scaled_reward(100, *values)
        function.accuracy = lambda completions, solution: [
            {"r": 1.0, "w": 0.0, "?": None}[text] for text in completions
        ]
        for text, (low, high) in {"r": (values[2], values[3]), "w": (values[1], values[0])}.items():
            found = function([text] * len(lengths), ["7"] * len(lengths), [[1] * n for n in lengths])
            expected = [low + (high - low) * (1 + math.cos(math.pi * min(n / 100, 1))) / 2 for n in lengths]
            assert found == pytest.approx(expected)
        assert function(["?"], ["7"], [[1]]) == [None]
    assert get_cosine_scaled_reward(max_len=100)(
        _messages(rf"\boxed{{{THIRD}}}", r"\boxed{2}"), [THIRD] * 2, completion_ids=[[1] * 50] * 2, prompts=["x"] * 2
    ) == pytest.approx([0.75, -0.75])


@pytest.mark.parametrize(
    "make",
    [
        lambda: get_repetition_penalty_reward(max_penalty=0.5),
        lambda: get_repetition_penalty_reward(ngram_size=0),
        lambda: get_soft_overlong_punishment(100, -1),
        lambda: get_cosine_scaled_reward(0),
    ],
)
def test_settings_without_a_meaning_are_refused(make: object) -> None:
    """They would divide by zero, or reward what should be punished, in the middle of a step."""
    with pytest.raises(ValueError, match=r"^\w+=-?[0-9.]+"):
        make()


def test_names_on_the_command_line_are_measured_by_the_run() -> None:
    """A limit of another run's length would never, or always, punish."""
    functions = {name: make(50, FakeScorer()) for name, make in BUILTIN.items()}
    assert functions["get_soft_overlong_punishment"]([[1] * 40, [1] * 45, [1] * 50]) == [0.0, -0.5, -1.0]
    assert functions["get_cosine_scaled_reward"](["7", "8"], ["7", "7"], [[1] * 50, []]) == pytest.approx([0.5, -1.0])
    assert functions["get_repetition_penalty_reward"]([[1] * 4]) == [-0.5]
    assert functions["think_format_reward"] is think_format_reward
    assert [function.__name__ for function in functions.values()] == [
        "accuracy_reward",
        "reasoning_accuracy_reward",
        "think_format_reward",
        "cosine_scaled_reward",
        "repetition_penalty_reward",
        "soft_overlong_punishment_reward",
    ]
