"""What the verifiers of mathematics call right, on hand-worked answers, and how long hostile ones may take."""

from __future__ import annotations

import contextlib
import gc
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.config.schema import Reward
from mgrpo.rewards.verifier import Answer
from mgrpo.rewards.verifiers.answers.places import boxed_answer, last_formula, minerva_answer
from mgrpo.rewards.verifiers.cpu_limit import OutOfTime, cpu_limit
from mgrpo.rewards.verifiers.mathematics import Math, StrictMath

MINERVA = "Final Answer: The final answer is {}. I hope it is correct."


def score(verifier: type[Math | StrictMath], completion: str, label: object) -> float:
    return verifier(Reward()).score(Answer(completion=completion, ground_truth=label))


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        (r"so \boxed{8}", "8", 1.0),
        (r"so \boxed{8}", 8, 1.0),
        (r"<think>\boxed{9}</think>\boxed{8}", "8", 1.0),
        (r"<think>\boxed{8}</think> 9", "8", 0.0),
        (r"\boxed{3} no, \boxed{4}", "4", 1.0),
        (r"\boxed{3} no, \boxed{4}", "3", 0.0),
        (r"\boxed{7}", r"\boxed{7}", 1.0),
        (r"\boxed{7} then \boxed{8", "7", 1.0),
        (r"\boxed{\boxed{7}}", "7", 1.0),
        (r"$\boxed 7$ it is", "7", 1.0),
        (r"\boxed{3}, no, $\boxed 7$", "7", 1.0),
        (r"\boxed{8}", "7", 0.0),
        (r"\boxed{1, 234}", "1234", 0.0),
        (r"\boxed{}", "7", 0.0),
        (r"the 7 is \boxed{}", "7", 0.0),
        (MINERVA.format("$7$"), "7", 1.0),
        (MINERVA.format("$x = 7$ square units"), "7", 1.0),
        (MINERVA.format("8") + " or 7", "7", 0.0),
        (r"\boxed{8} " + MINERVA.format("7"), "7", 1.0),
        ("we get $x^2+1$ for all 3 cases", "1+x^2", 1.0),
        ("first $7$, then $8$", "7", 0.0),
        ("x^2 + 1", "1+x^2", 1.0),
        ("cab", "abc", 0.0),
        ("Answer: 7", "7", 1.0),
        ("The answer is 7 apples.", "7", 1.0),
        ("it is $x=7$", "7", 1.0),
        (r"it is \(\frac{14}{2}\)", "7", 1.0),
        ("7, or rather 8", "7", 0.0),
        ("no idea", "7", 0.0),
        ("", "7", 0.0),
        ("a line\n" * 1000 + r"so it is $\frac{1}{2}$", "0.5", 1.0),
    ],
)
def test_math_finds_the_answer(completion: str, label: object, expected: float) -> None:
    """Joining boxes, reading the thoughts, or looking past a box would reward the wrong completions."""
    assert score(Math, completion, label) == expected


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        (MINERVA.format("7"), "7", 1.0),
        ("Final Answer: The final answer is 7. ", "7", 1.0),
        (MINERVA.format("8"), "7", 0.0),
        (MINERVA.format("7") + MINERVA.format("8"), "8", 1.0),
        (MINERVA.format("7") + MINERVA.format("8"), "7", 0.0),
        ("<think>" + MINERVA.format("7") + "</think>", "7", 0.0),
        ("The final answer is 7.", "7", 0.0),
        ("the answer is $7$", "7", 0.0),
        ("$7$", "7", 1.0),
        ("7", "7", 1.0),
        (r"\boxed{7}", "7", 1.0),
        (r"\boxed{7} and $8$", "7", 0.0),
        ("The answer is 7", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_strict_math_reads_the_sentence_or_everything(completion: str, label: str, expected: float) -> None:
    """It is there to teach one format: an answer anywhere else must not count."""
    assert score(StrictMath, completion, label) == expected


@pytest.mark.parametrize("label", ["", "$$", " ", r"\boxed{}", None, True, {"a": 1}, [], ["", "$"]])
def test_mathematics_refuses_a_label_it_cannot_read(label: object) -> None:
    """An unreadable label is no score, not a wrong answer."""
    for verifier in (Math, StrictMath):
        with pytest.raises(ValueError, match="ground_truth"):
            score(verifier, r"\boxed{7}", label)


def test_mathematics_compares_labels_that_are_no_mathematics_as_strings() -> None:
    """Rows whose label math-verify cannot read would never have a score."""
    assert score(Math, r"\boxed{+ \rightarrow \}}", r"+\rightarrow\}") == 1.0
    assert score(Math, r"\boxed{7}", r"+\rightarrow\}") == 0.0


def test_any_of_several_labels_is_right() -> None:
    """A row with several accepted answers would be unsolvable."""
    assert score(Math, r"\boxed{\frac12}", ["7", "0.5"]) == 1.0
    assert score(Math, "it is 7", ["x", 7]) == 1.0
    assert score(Math, r"\boxed{8}", ["7", "0.5"]) == 0.0
    for nothing in "", r"\boxed{}", "$$", r"\boxed{\text{ }}":
        assert score(Math, nothing, ["7", ""]) == 0.0


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{\boxed{1}}", "1"),
        (r"{ \boxed{1}", "1"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\fbox{1} \fboxed{2}", "2"),
        (r"\boxed{\left\{1\right\}}", r"\left\{1\right\}"),
        ("boxed", None),
        (r"\boxed{" * 20_000, None),
    ],
)
def test_boxed_answer_pairs_braces(text: str, contents: str | None) -> None:
    """A cut-off expression would be compared with the whole label and lose."""
    assert boxed_answer(text) == contents


def test_places_of_answers() -> None:
    """Hand-worked: a box without braces ends at a dollar sign; Minerva's end may be the end of the text."""
    assert boxed_answer(r"\boxed 4$ so \boxed{3}") == "3"
    assert boxed_answer(r"\boxed{3} or \boxed 4 $.") == "3, 4"
    assert boxed_answer("4") is None
    assert minerva_answer("Final Answer: The final answer is 5. ") == "5"
    assert minerva_answer("Final Answer: The final answer is 5.") is None
    assert minerva_answer("Final Answer: The final answer is\n5. I hope it is correct.") is None
    assert last_formula("$a$ b $c$ d") == "c"
    assert last_formula("$a") is None


HOSTILE = [
    "9^{9^{9^9}}",
    "9**9**9**9",
    "10^{10^{10}}",
    "10000000!",
    "((3!)!)!",
    "10^{-10^{10}}",
    r"\left(\frac13\right)^{99999999}",
    "2^{2^{2^{2^{2^{2}}}}}",
    "1E1000000",
    "1$E-1000000",
    r"\sqrt[9^{9^9}]{2}",
    r"\binom{1000000000}{500000000}",
    r"{1000000 \choose 500000}",
    r"\gcd(10^{10^{10}}, 3)",
    r"\Gamma(1234567)",
    r"\log_{2}(2^{10^{9}})",
    r"\sum_{n=1}^{1000000000} n^{n}",
    r"\lfloor 10^{10^{10}} \rfloor",
    r"7^{100000000} \mod 10",
    "x=9^{9^9}",
    "(1, 9^{9^9})",
    r"\begin{pmatrix}9^{9^9}\\1\end{pmatrix}",
    r"\sinh(10^{10})",
    "(x+1)^{1000}",
    "(x+y+z+w)^{60}",
    "(" * 60 + "1" + ")" * 60,
    "{" * 40 + "1" + "}" * 40,
    "|x" * 50,
    r"\frac{" * 5000 + "1" + "}{2}" * 5000,
    r"\sqrt{" * 40 + "2" + "}" * 40,
    r"\int " * 14 + "x dx",
    "|x" * 70,
    "1+" * 5000 + "1",
    r"\text{" * 3000 + "}" * 3000,
    "7\0",
    "\ud800",
    "\u202e7",
]


@pytest.mark.parametrize("label", ["8", r"\frac{\sqrt{3}}{2}", "x^2+1"])
def test_hostile_expressions_are_wrong_and_quick(label: str) -> None:
    """Each would keep sympy busy for minutes; no score in place of 0 would spare the policy that writes them."""
    for answer in HOSTILE:
        for form in (r"\boxed{%s}", "so it is $%s$", "%s", MINERVA.replace("{}", "%s")):
            started = time.monotonic()
            assert score(Math, form.replace("%s", answer), label) == 0.0, answer[:50]
            assert time.monotonic() - started < 20, answer[:50]


SLOW = [
    r"\sum_{n=1}^{9999}\sqrt{n}",
    r"\sum_{n=1}^{999}\sin(n)",
    r"\prod_{n=1}^{9999}(1+\frac{1}{n^2})",
    r"\frac{\sin(x)+\sin(3x)+\sin(5x)+\sin(7x)}{\cos(x)+\cos(3x)+\cos(5x)+\cos(7x)}=\tan(6x)",
]


# The limit may strike within hypothesis' own callbacks, where it is reported and strikes again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_answer_that_keeps_sympy_busy_is_wrong() -> None:
    """Without a score it would escape its advantage, and a batch of them would cost a worker and a time limit each."""
    verifier = Math(Reward(verifier_timeout=2.0))
    for answer in SLOW:
        for label in "8", r"\tan(4x)":
            started = time.process_time()
            assert verifier.score(Answer(completion=rf"\boxed{{{answer}}}", ground_truth=label)) == 0.0
            assert time.process_time() - started < 2.0, answer


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_label_that_takes_too_long_to_read_is_no_score() -> None:
    """A broken row would punish every answer to its prompt."""
    verifier = Math(Reward(verifier_timeout=1.0))
    with pytest.raises(ValueError, match=r"ground_truth.* takes longer than 0\.1 s"):
        verifier.score(Answer(completion=r"\boxed{7}", ground_truth="|x" * 60))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_processor_time_ends_work_that_swallows_exceptions() -> None:
    """sympy and math-verify catch every `Exception`, and go on."""
    with pytest.raises(OutOfTime), cpu_limit(0.05):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))


def test_only_the_works_own_processor_time_counts() -> None:
    """A label would be refused because a thread of the process is busy, or because its heap is large."""
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            sum(range(1000))

    collections: list[str] = []
    thread = threading.Thread(target=compute)
    thread.start()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with cpu_limit(0.05):
            started = time.process_time()
            while time.process_time() < started + 0.5:
                time.sleep(0.01)
            cycles: list[list[object]] = [[] for _ in range(10_000)]
            for cycle in cycles:
                cycle.append(cycle)
            assert not collections
        assert gc.isenabled()
    finally:
        gc.callbacks.pop()
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    "unit",
    [
        "A", "$", "$ ", "\n", "{", "}", "9", "1 ", "=", "\\", "\0", "\ud800", "\u202e", r"\boxed{", r"\boxed ", r"\frac",
        r"\sqrt{", r"\text{", r"\text{}", "Final Answer: The final answer is", ". I hope it is correct.", "</think>", "9^{",
    ],
)  # fmt: skip
def test_mathematics_takes_linear_time(unit: str) -> None:
    """A policy that learns to repeat a token would stall the run at the verifier."""
    text = (unit * 200_000)[:200_000]
    started = time.monotonic()
    for completion in (text, rf"\boxed{{{text}}}", f"${text}$"):
        assert score(Math, completion, "x+8") == 0.0
        assert score(StrictMath, completion, "x+8") == 0.0
    assert time.monotonic() - started < 30


_PIECES = ["$", "{", "}", "(", ")", "^", "_", "|", "=", "<", ",", "+", "-", "!", "%", "1", "0.5", "10", "x", " ", "\n"]
_PIECES += [
    r"\frac{",
    r"\sqrt",
    r"\boxed{",
    r"\text{",
    r"\{",
    r"\}",
    r"\infty",
    r"\pm",
    r"\cdot",
    r"\sin",
    r"\\",
    r"\left(",
]


@settings(max_examples=60, deadline=20_000)
@given(
    st.lists(st.sampled_from(_PIECES), max_size=12).map("".join) | st.text(max_size=40), st.sampled_from(["7", "x+1"])
)
def test_mathematics_scores_any_text_as_right_or_wrong(text: str, label: str) -> None:
    """An exception would leave an odd answer without a score, where it is plainly wrong."""
    for completion in (text, rf"\boxed{{{text}}}", MINERVA.format(text)):
        assert score(Math, completion, label) in (0.0, 1.0)
        assert score(StrictMath, completion, label) in (0.0, 1.0)


@settings(max_examples=40, deadline=20_000)
@given(
    st.sampled_from([r"\frac{1}{2}", "x+1", r"\{1, 2\}", "7", r"\text{east}", "-3.5"]),
    st.text(alphabet=" \n\t", max_size=4),
    st.text(alphabet=" \n\t", max_size=4),
)
def test_white_space_around_an_answer_changes_nothing(answer: str, before: str, after: str) -> None:
    """Rewards would depend on the style of a box."""
    spaced = before + answer + after
    assert score(Math, rf"\boxed{{{spaced}}}", answer) == 1.0
    assert score(Math, rf"\boxed{{{answer}}}", spaced) == 1.0
    assert score(Math, rf"{before}it is \boxed{{{answer}}}{after}", "8") == 0.0
