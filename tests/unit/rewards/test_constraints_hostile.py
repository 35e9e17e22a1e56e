"""No answer may crash a checker or keep it busy, whatever it holds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mgrpo.rewards.constraints.label_arguments import bound
from mgrpo.rewards.constraints.old import OLD_FUNCTIONS
from mgrpo.rewards.constraints.scoring import bound_instructions, kept
from tests.unit.rewards.constraint_cases import IFBENCH_CASES, IFEVAL_CASES, OPEN_INSTRUCT_CASES
from tests.unit.rewards.test_constraints_old import CASES as OLD_CASES
from tests.unit.rewards.test_constraints_table import NEEDS

LENGTH = 200_000
LIMIT_S = 20.0
"""Ten times and more what the slowest takes."""


PIECES = ". ? ! \" ' ` * - [ ] < > ( ) : , A b 1 \n \t \x00 “ ” Mr. U.S. ..."


def _available(name: str) -> bool:
    try:
        __import__(NEEDS.get(name, "re"))
    except ImportError:
        return False
    return True


def _checks() -> dict[str, Callable[[str], bool]]:
    checks: dict[str, Callable[[str], bool]] = {}
    for case in IFEVAL_CASES + OPEN_INSTRUCT_CASES + IFBENCH_CASES:
        if _available(case.name):
            checks[f"{case.name} {case.kwargs}"] = bound_instructions([case.name], [case.kwargs])[0]
    for name, kwargs, *_ in OLD_CASES:
        if name != "validate_response_language" or _available("language:response_language"):
            checks[f"{name} {kwargs}"] = bound(name, OLD_FUNCTIONS[name], kwargs)
    return checks


def _random_text() -> str:
    draw = random.Random(0)
    return "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(160, 0xD800)))) for _ in range(LENGTH))


HOSTILE = {
    "one word": "A" * LENGTH,
    "brackets": "[" * LENGTH,
    "asterisks": "*" * LENGTH,
    "lines": "x" + "\n" * (LENGTH - 2) + "x",
    "random": _random_text(),
}
HOSTILE_TO_ONE = {
    "sentences": "A. " * (LENGTH // 3),
    "angles": "<<" * (LENGTH // 2),
    "first words": "The " * (LENGTH // 4),
    "questions": "Question 1" + "\n" * LENGTH + "x",
    "table": 'ProductID,Category,Brand,Price,Stock\n1,2,3,4,"' + "A!" * (LENGTH // 2),
    "empty lines": "\n \n" * (LENGTH // 3),
}
ALL_HOSTILE = [
    *(pytest.param(answer, id=name) for name, answer in HOSTILE.items()),
    *(pytest.param(answer, id=name, marks=pytest.mark.slow) for name, answer in HOSTILE_TO_ONE.items()),
]


@pytest.mark.parametrize("answer", ALL_HOSTILE)
def test_no_checker_is_kept_busy_by_a_long_answer(answer: str) -> None:
    """A regular expression that tries again from every character needs hours, and every worker would be killed."""
    for name, check in _checks().items():
        start = time.process_time()
        assert check(answer) in (True, False), name
        assert time.process_time() - start < LIMIT_S, name


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(
        st.text(st.characters(), max_size=60),
        st.lists(st.sampled_from([" ", *PIECES.split(" ")])).map("".join),
    )
)
def test_no_text_crashes_a_checker(answer: str) -> None:
    """An exception would be taken for a broken label, and a hostile answer would get away without its 0."""
    for name, check in _checks().items():
        assert kept([check], answer, loose=True)[0] in (True, False), name
        assert check(answer) in (True, False), name
