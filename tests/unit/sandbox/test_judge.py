"""Assert tests of every common form: the same verdicts as from `exec`, and decided outside of the program's process."""

from __future__ import annotations

import pytest

from mgrpo.sandbox.sandbox import Sandbox, Verdicts

PLENTY_S = 20.0
RIGHT = """
import collections, enum, math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fractions import Fraction
from math import isclose

def add(a, b): return a + b
def half(x): return x / 2
def order(xs): return sorted(xs)
def order_in_place(xs): xs.sort()
def pairs(n): return [(i, i * i) for i in range(n)]
def letters(s): return {c: s.count(c) for c in s}
def grouped(words):
    found = defaultdict(list)
    for word in words: found[len(word)].append(word)
    return found
def unique(xs): return set(xs)
def evens(n): yield from range(0, n, 2)
def endless():
    n = 0
    while True:
        yield n
        n += 1
def is_even(n): return n % 2 == 0
def find(xs, x): return xs.index(x) if x in xs else None
def root(x):
    if x < 0: raise ValueError("negative")
    return math.sqrt(x)
def greet(name): return f"Hello, {name}!"
def power(n): return 2 ** n
def flip(z): return z.conjugate()
def raw(n): return bytes(range(n))
def counts(s): return Counter(s)
def latest(xs): return deque(xs, 2)
def share(a, b): return Fraction(a, b)
def price(text): return Decimal(text) * 2
def new_year(year): return date(year, 1, 1)
def twice(f, x): return f(f(x))
def nothing(*args, **named): return None
def same(xs): return xs
def sum(a, b): return a + b
candidate = add
Place = namedtuple("Place", "x y")
class Color(enum.IntEnum):
    RED = 1
class Lost(ValueError): pass
def lose(): raise Lost("gone")
@dataclass
class Point:
    x: int
    y: int
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __mul__(self, n): return Point(self.x * n, self.y * n)
    def __len__(self): return 2
    def move(self, n): self.x += n
class Solution:
    def __init__(self, start=0): self.start = start
    def plus(self, n): return self.start + n
class Node:
    def __init__(self, value, rest=None): self.value, self.next = value, rest
    def __iter__(self):
        node = self
        while node: yield node.value; node = node.next
    def __contains__(self, value): return any(value == other for other in self)
def chain(values): return Node(values[0], chain(values[1:])) if values else None
"""
WRONG = (
    RIGHT
    + """
def add(a, b): return a - b
candidate = add
def half(x): return x / 3
def order(xs): return list(xs)
def order_in_place(xs): return sorted(xs)
def pairs(n): return [(i, i) for i in range(n)]
def letters(s): return {}
def grouped(words): return {}
def unique(xs): return list(xs)
def evens(n): yield from range(0, n, 3)
def endless(): return iter([7, 7, 7, 7, 7])
def is_even(n): return n % 2
def find(xs, x): return 17
def root(x): return x
def greet(name): return f"Hello {name}"
def power(n): return 2 ** n + 1
def flip(z): return z
def raw(n): return bytes(n)
def counts(s): return Counter()
def latest(xs): return deque(xs)
def share(a, b): return Fraction(a, b) + 1
def price(text): return Decimal(text)
def new_year(year): return date(year, 1, 2)
def twice(f, x): return f(x)
def nothing(*args, **named): return 0
def same(xs): return 1
def sum(a, b): return a - b
Place = namedtuple("Place", "y x")
class Color(enum.IntEnum):
    RED = 2
def lose(): raise KeyError("lost")
Point.__add__ = lambda self, other: Point(0, 0)
Point.__mul__ = lambda self, n: Point(0, 0)
Point.__len__ = lambda self: 3
Point.move = lambda self, n: None
Solution.plus = lambda self, n: 0
Node.__iter__ = lambda self: iter([])
Node.__contains__ = lambda self, value: False
def chain(values): return Node(0)
"""
)

OUTSIDE = [
    "assert add(1, 2) == 3",
    "assert add([1], [2]) == [1, 2], f'{add([1], [2])} is wrong'",
    "assert(add('a', 'b') == 'ab')",
    "assert 3 == add(1, 2)",
    "assert 0 < add(1, 2) < 4",
    "assert add(1, 2) == 3 and add(2, 2) == 4",
    "assert add(1, 2) == 0 or add(1, 2) == 3",
    "assert not add(1, 2) != 3",
    "assert add(add(1, 2), 3) == 6",
    "assert add(1, 2) in (3, 4)",
    "assert add(a=1, b=2) == 3",
    "assert add(*[1, 2]) == 3",
    "assert abs(half(3) - 1.5) < 1e-6",
    "assert round(half(1.234), 2) == 0.62",
    "assert math.isclose(half(3), 1.5)",
    "import math\nassert math.isclose(half(3), 1.5, rel_tol=1e-9)",
    "from math import isclose as near\nassert near(half(3), 1.5)",
    "assert isclose(half(3), 1.5)",
    "assert half(3) == pytest_approx if False else half(3) == 1.5",
    "assert sorted(order([3, 1, 2])) == [1, 2, 3] and order([3, 1, 2]) == [1, 2, 3]",
    "xs = [3, 1, 2]\norder_in_place(xs)\nassert xs == [1, 2, 3]",
    "xs = [3, 1, 2]\nwanted = sorted(xs)\nassert order(xs) == wanted",
    "xs = [3, 1, 2]\nresult = order(xs)\nassert result == sorted(xs)\nassert len(result) == 3",
    "assert pairs(3) == [(0, 0), (1, 1), (2, 4)]",
    "assert pairs(3)[2] == (2, 4)",
    "assert tuple(pairs(3)[-1]) == (2, 4)",
    "a, b = pairs(3)[2]\nassert b == 4",
    "assert [b for _, b in pairs(3)] == [0, 1, 4]",
    "assert sorted(pairs(3), key=lambda pair: -pair[1])[0] == (2, 4)",
    "assert letters('aab') == {'a': 2, 'b': 1}",
    "assert letters('aab')['a'] == 2",
    "assert letters('aab').get('a') == 2",
    "assert set(letters('aab').keys()) == {'a', 'b'}",
    "assert grouped(['a', 'bb', 'c']) == {1: ['a', 'c'], 2: ['bb']}",
    "assert unique([1, 1, 2]) == {1, 2}",
    "assert len(unique([1, 1, 2])) == 2",
    "assert list(evens(5)) == [0, 2, 4]",
    "assert max(evens(5)) == 4",
    "g = endless()\nassert [next(g) for _ in range(3)] == [0, 1, 2]\nassert next(g) == 3",
    "assert is_even(2)\nassert not is_even(3)",
    "assert is_even(2) is True",
    "assert find([1, 2], 3) is None",
    "assert find([1, 2], 2) is not None and find([1, 2], 2) == 1",
    "assert isinstance(half(3), float) and half(3) == 1.5",
    "assert type(unique([1])) == set",
    "assert root(4) == 2.0",
    "try:\n    root(-1)\n    assert False\nexcept ValueError as err:\n    assert 'negative' in str(err)",
    "try:\n    root(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError('no error')",
    "import pytest\nwith pytest.raises(ValueError, match='neg'):\n    root(-1)",
    "try:\n    lose()\nexcept ValueError:\n    pass",
    "assert greet('Ann') == 'Hello, Ann!'",
    "assert greet('Ann').lower().startswith('hello, ann')",
    "assert ', '.join([greet('A'), greet('B')]) == 'Hello, A!, Hello, B!'",
    "assert f'<{greet(\"Ann\")}>' == '<Hello, Ann!>'",
    "assert power(200) == 2 ** 200",
    "assert flip(1 + 2j) == 1 - 2j",
    "assert raw(3) == b'\\x00\\x01\\x02'",
    "assert counts('aab') == {'a': 2, 'b': 1}",
    "assert counts('aab') == Counter('aab')",
    "from collections import Counter\nassert counts('aab').most_common(1) == [('a', 2)]",
    "assert latest([1, 2, 3]) == deque([2, 3])",
    "assert share(1, 2) == Fraction(1, 2)",
    "assert price('1.25') == Decimal('2.50')",
    "assert new_year(2020) == date(2020, 1, 1)",
    "assert twice(lambda x: x + 3, 1) == 7",
    "assert nothing([1], {'a': 1}, x=None) is None",
    "assert same((1, [2], {3: {4}}, None, 1.5, -0.0, float('inf'))) == (1, [2], {3: {4}}, None, 1.5, 0.0, float('inf'))",
    "assert sum(1, 2) == 3",
    "assert Place(1, 2).x == 1",
    "xs = [2]\nys = xs\nys.append(1)\norder_in_place(xs)\nassert ys == [1, 2]",
    "result = []\nfor n in range(3):\n    result.append(half(n))\nassert result == [0.0, 0.5, 1.0]",
    "try:\n    root(-1)\n    raise KeyError\nexcept Exception as err:\n    assert type(err).__name__ == 'ValueError'",
    "assert letters('aab').keys() == {'a', 'b'}",
    "cases = [{'x': 3, 'y': 1.5}]\nfor case in cases:\n    assert half(case['x']) == case['y']",
    "assert str(Place(1, 2)) == 'Place(x=1, y=2)'",
    "assert repr(letters('a')) == \"{'a': 1}\"",
    "n, m = 3, 4\nn += add(n, m)\nassert add(n, m) == n + m",
    "assert Place(y=1, x=2) == (2, 1)",
    "assert Color.RED == 1",
    "assert Solution().plus(2) == 2\nassert Solution(1).plus(2) == 3",
    "s = Solution(3)\nassert s.plus(4) == 7",
    "p = Point(1, 2)\np.move(4)\nassert p.x == 5",
    "assert len(Point(1, 2)) == 2",
    "assert list(chain([1, 2])) == [1, 2]",
    "assert chain([1, 2]).next.value == 2",
    "for x, y in [(2, 1.0), (3, 1.5)]:\n    assert half(x) == y",
    "cases = {2: 1.0, 3: 1.5}\nfor x in cases:\n    assert half(x) == cases[x]",
    "for xs in ([2, 1], [3, 2]):\n    order_in_place(xs)\n    assert xs[0] < xs[1]",
    "assert all(half(x) == y for x, y in [(2, 1.0), (3, 1.5)])",
    "assert any(add(n, 1) == 5 for n in range(5))",
    "assert [half(n) for n in range(3)] == [0.0, 0.5, 1.0]",
    "i = 0\nwhile i < 3:\n    assert add(i, i) == 2 * i\n    i += 1\nassert add(i, 1) == 4",
    "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(\n        2, 2) == 4\ncheck(add)",
    "assert candidate(1, 2) == 3",
    "if add(1, 2) != 3:\n    raise AssertionError",
    "x: int = add(1, 2)\nassert x == 3",
    "x = y = add(1, 2)\nx += 1\nassert (x, y) == (4, 3)",
    "assert (n := add(1, 2)) == 3 and n == 3",
    "assert add(1, 2) == add(2, 1) == 3",
    "assert sorted(set(order([2, 1, 2]))) == [1, 2] and order([2, 1]) != [2, 1]",
    "assert '\u00e9' + greet('\u00e9') == '\u00e9Hello, \u00e9!'",
    "print(add(1, 2))\nassert add(1, 2) == 3",
]
"""Decided outside; the right program passes, the wrong one fails."""
INSIDE = [
    "assert is_even(add(1, 3)) and add(1, 3) == 4\nassert is_even(add(1, 3))",
    "assert Point(1, 2) == Point(1, 2) and Point(1, 2) * 2 == Point(2, 4)",
    "assert Point(1, 2) + Point(1, 1) == Point(2, 3)",
    "assert isinstance(chain([1]).next, (Node, type(None))) and 1 in chain([1])",
    "assert type(Place(1, 2)) == Place and Place(1, 2).x == 1",
    "n = Node(1, Node(2))\nassert 2 in n\nassert n.value == 1",
    "assert hasattr(Place(1, 2), 'x') and Place(1, 2)[0] == Place(1, 2).x == add(0, 1)",
    "def reference(a, b): return a + b\nassert add(1, 2) == reference(1, 2)",
    "def check_all(f):\n    for n in range(3): assert f(n, n) == 2 * n\ncheck_all(add)\ncheck_all(candidate)",
    "try:\n    lose()\nexcept Lost:\n    pass",
    "class Case:\n    def run(self): assert add(1, 2) == 3\nCase().run()",
    "import unittest\nunittest.TestCase().assertEqual(add(1, 2), 3)",
    "import pytest\nassert half(3) == pytest.approx(1.5, rel=1e-3)",
    "from pytest import approx\nassert approx([1.0, 2.0]) == [half(2), half(4)]",
]
"""The program's process decides; the right program passes, the wrong one fails."""
ARRAYS = "import numpy as np\ndef squares(n): return np.arange(n) ** 2\ndef total(xs): return np.sum(xs)"
WRONG_ARRAYS = "import numpy as np\ndef squares(n): return np.arange(n) * 3\ndef total(xs): return np.sum(xs) + 1"
OF_ARRAYS = {
    "assert squares(3).tolist() == [0, 1, 4]": 0,
    "assert list(squares(3)) == [0, 1, 4] and total([1, 2]) == 3": 0,
    "assert np.allclose(squares(3), [0, 1, 4])": 1,
    "assert (squares(3) == np.array([0, 1, 4])).all()": 1,
}
"""And whether the program's process decides: the module `numpy` that it checks with is the program's."""


def verdict(program: str, test: str) -> int:
    """By Python itself."""
    names: dict[str, object] = {"__name__": "program"}
    exec(compile(program, "<program>", "exec", dont_inherit=True), names)
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), names)
    except BaseException:
        return 0
    return 1


@pytest.fixture(scope="module")
def judged(sandbox: Sandbox) -> dict[str, tuple[Verdicts, Verdicts]]:
    """Of the right and of the wrong program, by form."""
    forms = {"outside": OUTSIDE, "inside": INSIDE}
    runs = {
        form: [sandbox.run_asserts(program, tests, PLENTY_S) for program in (RIGHT, WRONG)]
        for form, tests in forms.items()
    }
    return {form: (right.result(), wrong.result()) for form, (right, wrong) in runs.items()}


@pytest.mark.parametrize("form", ["outside", "inside"])
def test_verdicts_are_those_of_python(form: str, judged: dict[str, tuple[Verdicts, Verdicts]]) -> None:
    """A right program that loses its reward, or a wrong one that gets it, teaches the policy something else."""
    tests = OUTSIDE if form == "outside" else INSIDE
    assert len(OUTSIDE) >= 60
    for program, verdicts, wanted in zip((RIGHT, WRONG), judged[form], (1, 0), strict=True):
        expected = {test: wanted for test in tests}
        assert {test: verdict(program, test) for test in tests} == expected
        assert dict(zip(tests, verdicts.results, strict=True)) == expected


def test_a_verdict_says_where_it_was_decided(judged: dict[str, tuple[Verdicts, Verdicts]]) -> None:
    """Those that a program can forge are counted, so they must be told apart."""
    right = {form: verdicts[0].in_process for form, verdicts in judged.items()}
    assert dict(zip(OUTSIDE, right["outside"], strict=True)) == dict.fromkeys(OUTSIDE, 0)
    assert dict(zip(INSIDE, right["inside"], strict=True)) == dict.fromkeys(INSIDE, 1)


def test_arrays_are_judged(sandbox: Sandbox) -> None:
    """Their elements count as Python's numbers."""
    for program, wanted in ((ARRAYS, 1), (WRONG_ARRAYS, 0)):
        verdicts = sandbox.run_asserts(program, list(OF_ARRAYS), PLENTY_S).result()
        assert verdicts.results == [verdict(program, test) for test in OF_ARRAYS] == [wanted] * 4
        assert verdicts.in_process == list(OF_ARRAYS.values())
