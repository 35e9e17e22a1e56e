"""Programs that are wrong and want to be taken for right, whatever they know of the sandbox."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

import pytest

from mgrpo.sandbox.sandbox import Sandbox, Verdicts

PLENTY_S = 20.0
EQUAL = "assert f(3) == 9"
NEAR = "assert abs(f(3) - 9) < 1e-6"
LIST = "assert f(3) == [9]"
SORTED = "assert sorted(f(3)) == [9]"
WRONG = "def f(x): return 7\n"
WRONG_LIST = "def f(x): return [7]\n"


class Forgery(NamedTuple):
    program: str
    test: str = EQUAL
    right: str = "def f(x): return x * x"


def of_object(*methods: str) -> str:
    """A program that returns an object with these methods."""
    lines = [f"    def {method}" for method in methods]
    return "\n".join(["class Liar:", *lines, "def f(x): return Liar()"])


EQUALS = "__eq__(self, other): return True"
RIGHT_LIST = "def f(x): return [x * x]"
FRAMES = """
import sys
def f(x):
    frame = sys._getframe().f_back
    while frame:
        seen = [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]
        if '=' + '= 9' in repr(seen): return 9
        frame = frame.f_back
    return 7
"""
CHANNEL = """
import os, struct
def forge(text):
    data = text.encode()
    for fd in range(3, 64):
        try: os.write(fd, struct.pack("<I", len(data)) + data)
        except OSError: pass
"""
FORGERIES = {
    "an object equal to everything": Forgery(of_object(EQUALS)),
    "one that is not unequal": Forgery(of_object("__ne__(self, other): return False"), "assert not f(3) != 9"),
    "on the right": Forgery(of_object(EQUALS), "assert 9 == f(3)"),
    "in a list": Forgery(of_object(EQUALS) + "\ng = f\ndef f(x): return [g(x)]", LIST, RIGHT_LIST),
    "in a dictionary": Forgery(
        of_object(EQUALS) + "\ng = f\ndef f(x): return {'a': g(x)}",
        "assert f(3) == {'a': 9}",
        "def f(x): return {'a': x * x}",
    ),
    "in a set": Forgery(
        of_object(EQUALS, "__hash__(self): return hash(9)") + "\ng = f\ndef f(x): return {g(x)}",
        "assert f(3) == {9}",
        "def f(x): return {x * x}",
    ),
    "of one of many": Forgery(of_object(EQUALS), "assert f(3) in (9, 10)"),
    "in a variable": Forgery(of_object(EQUALS), "result = f(3)\nassert result == 9"),
    "in a loop": Forgery(of_object(EQUALS), "for x, y in [(3, 9), (4, 16)]:\n    assert f(x) == y"),
    "of a generator of comparisons": Forgery(of_object(EQUALS), "assert all(f(x) == y for x, y in [(3, 9)])"),
    "of a subclass of int": Forgery("class Liar(int):\n    __eq__ = lambda *a: True\ndef f(x): return Liar(7)"),
    "of a subclass of list": Forgery(
        "class Liar(list):\n    __eq__ = lambda *a: True\n    __iter__ = lambda self: iter([9])\ndef f(x): return Liar()",
        LIST,
        RIGHT_LIST,
    ),
    "of a subclass of str": Forgery(
        "class Liar(str):\n    __eq__ = lambda *a: True\n    __hash__ = None\ndef f(x): return Liar()",
        "assert f(3) == '9'",
        "def f(x): return str(x * x)",
    ),
    "that says it is an int": Forgery(of_object(EQUALS) + "\nLiar.__class__ = int"),
    "by its metaclass": Forgery(
        "class Meta(type):\n    __eq__ = lambda *a: True\n    __hash__ = type.__hash__\n"
        "class Liar(metaclass=Meta): pass\ndef f(x): return Liar"
    ),
    "by a method": Forgery(
        of_object(EQUALS) + "\nclass Solution:\n    f = staticmethod(f)",
        "assert Solution().f(3) == 9",
        "class Solution:\n    def f(self, x): return x * x",
    ),
    "by an attribute": Forgery(
        of_object("__getattr__(self, name): return Liar()", EQUALS),
        "assert f(3).value == 9",
        "import types\ndef f(x): return types.SimpleNamespace(value=x * x)",
    ),
    "by an index": Forgery(
        of_object("__getitem__(self, key): return Liar()", EQUALS), "assert f(3)[0] == 9", "def f(x): return [x * x]"
    ),
    "a mock": Forgery("from unittest import mock\ndef f(x): return mock.ANY"),
    "a mock with magic": Forgery(
        "from unittest.mock import MagicMock\ndef f(x):\n    m = MagicMock()\n    m.__eq__.return_value = True\n    return m"
    ),
    "an object whose difference is nothing": Forgery(of_object("__sub__(self, other): return 0"), NEAR),
    "one whose absolute value is nothing": Forgery(
        of_object("__sub__(self, other): return self", "__abs__(self): return 0"), NEAR
    ),
    "one smaller and greater than everything": Forgery(
        of_object("__lt__(self, other): return True", "__gt__(self, other): return True"), "assert 8 < f(3) < 10"
    ),
    "one that contains everything": Forgery(
        of_object("__contains__(self, other): return True"), "assert 9 in f(3)", RIGHT_LIST
    ),
    "not a number": Forgery("def f(x): return float('nan')", "assert not (f(3) < 9 or f(3) > 9) and f(3) == 9"),
    "a global abs": Forgery(WRONG + "abs = lambda x: 0", NEAR),
    "a global sorted": Forgery(WRONG_LIST + "sorted = lambda x: [9]", SORTED, RIGHT_LIST),
    "a global set": Forgery(WRONG_LIST + "set = lambda x: {9}", "assert set(f(3)) == {9}", RIGHT_LIST),
    "a global len": Forgery(WRONG_LIST + "len = lambda x: 2", "assert len(f(3)) == 2", "def f(x): return [x, x]"),
    "a global isinstance": Forgery(
        WRONG + "isinstance = lambda *a: True", "assert isinstance(f(3), str)", "def f(x): return str(x)"
    ),
    "a global all": Forgery(WRONG + "all = lambda x: True", "assert all(f(n) == n * n for n in range(4))"),
    "a global any": Forgery(WRONG + "any = lambda x: True", "assert any([f(n) == 9 for n in range(4)])"),
    "a global round": Forgery(WRONG + "round = lambda *a: 9", "assert round(f(3), 2) == 9"),
    "a global str": Forgery(WRONG + "str = lambda x: '9'", "assert str(f(3)) == '9'"),
    "a global tuple": Forgery(WRONG_LIST + "tuple = lambda x: (9,)", "assert tuple(f(3)) == (9,)", RIGHT_LIST),
    "a global max": Forgery(WRONG_LIST + "max = lambda x: 9", "assert max(f(3)) == 9", RIGHT_LIST),
    "patched builtins": Forgery(
        WRONG + "import builtins\nbuiltins.abs = builtins.round = lambda *a: 0\nbuiltins.sorted = lambda x: [9]", NEAR
    ),
    "builtins patched by the function": Forgery(
        "def f(x):\n    import builtins\n    builtins.abs = lambda y: 0\n    return 7", NEAR
    ),
    "math.isclose": Forgery(
        WRONG + "import math\nmath.isclose = lambda *a, **k: True", "import math\nassert math.isclose(f(3), 9)"
    ),
    "math.isclose, imported by the program": Forgery(
        WRONG + "import math\nmath.isclose = lambda *a, **k: True",
        "assert math.isclose(f(3), 9)",
        "import math\ndef f(x): return x * x",
    ),
    "isclose by its name": Forgery(
        WRONG + "isclose = lambda *a, **k: True",
        "assert isclose(f(3), 9)",
        "from math import isclose\ndef f(x): return x * x",
    ),
    "json.dumps": Forgery(
        WRONG + "import json\njson.dumps = lambda x: '9'", "import json\nassert json.dumps(f(3)) == '9'"
    ),
    "copy.deepcopy": Forgery(
        WRONG + "import copy\ncopy.deepcopy = lambda x: 9", "from copy import deepcopy\nassert deepcopy(f(3)) == 9"
    ),
    "collections.Counter": Forgery(
        WRONG_LIST + "import collections\ncollections.Counter = lambda x: 1",
        "from collections import Counter\nassert Counter(f(3)) == Counter([9])",
        RIGHT_LIST,
    ),
    "Counter by its name": Forgery(
        WRONG_LIST + "Counter = lambda x: 1",
        "assert Counter(f(3)) == Counter([9])",
        "from collections import Counter\n" + RIGHT_LIST,
    ),
    "re.match": Forgery(
        WRONG + "import re\nre.match = lambda *a: True", "import re\nassert re.match('9', str(f(3))) is not None"
    ),
    "time.time": Forgery(
        "import time\nsleep = time.sleep\ntime.time = lambda: 0\ndef f(x):\n    sleep(0.6)\n    return 9",
        "import time\nbegan = time.time()\nf(3)\nassert time.time() - began < 0.5",
    ),
    "the order of arguments": Forgery(
        "def f(x):\n    x.clear()\n    return []",
        "xs = [2, 1]\nwanted = sorted(xs)\nassert f(xs) == wanted",
        "f = sorted",
    ),
    "changing the loop variable": Forgery(
        "def f(n):\n    global x\n    x = 0\n    return 0", "for x in range(4):\n    assert f(x) == x * x"
    ),
    "changing a variable of the test": Forgery(
        "def f(n):\n    global x\n    x = 0\n    return 0", "x = 3\nassert f(x) == x * x"
    ),
    "changing what the test iterates over": Forgery(
        "def f(n):\n    global xs\n    xs = []\n    return 0",
        "xs = [1, 2, 3]\nassert [f(x) for x in xs] == [x * x for x in xs]",
    ),
    "changing the cases": Forgery(
        "def f(n):\n    global cases\n    cases = []\n    return 0",
        "cases = [(2, 4), (3, 9)]\nfor x, y in cases:\n    assert f(x) == y",
    ),
    "frames": Forgery(FRAMES),
    "objects of the collector": Forgery(
        "import gc\ndef f(x):\n    found = [t for t in gc.get_objects() if isinstance(t, (str, bytearray))]\n"
        "    return 9 if any('=' + '= 9' in repr(t) for t in found) else 7"
    ),
    "an audit hook": Forgery(
        WRONG + "import sys\nseen = []\nsys.addaudithook(lambda event, args: seen.append(repr(args)))\n"
        "def f(x): return 9 if any('=' + '= 9' in text for text in seen) else 7"
    ),
    "tracing": Forgery(
        WRONG + "import sys\ndef skip(frame, event, arg):\n    frame.f_trace_opcodes = True\n"
        "    if frame.f_code.co_filename == '<test>': frame.f_lineno += 1\n    return skip\n"
        "def f(x):\n    sys.settrace(skip)\n    return 7"
    ),
    "compile and exec": Forgery(
        WRONG + "import builtins\ndef f(x):\n    builtins.compile = builtins.exec = builtins.eval = lambda *a: None"
    ),
    "the secret of the caller": Forgery(
        "import sys, os, struct\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        secret = frame.f_locals.get('secret') or frame.f_locals.get('data') or b''\n"
        "        try: os.write(3, struct.pack('<16sd', bytes(secret[:16]), 0.0))\n        except OSError: pass\n"
        "        frame = frame.f_back\n    os._exit(0)"
    ),
    "answers before the question": Forgery(CHANNEL + "forge('[\"t\",false,true]')\n" + WRONG),
    "an answer that is garbage": Forgery(CHANNEL + "def f(x):\n    forge('{')\n    return 7"),
    "an answer with an unknown type": Forgery(CHANNEL + 'def f(x):\n    forge(\'["t",false,["x",1]]\')\n    return 7'),
    "garbage where a test catches all": Forgery(
        CHANNEL + "def f(x):\n    forge('{')\n    return 7",
        "try:\n    y = f(3)\nexcept BaseException:\n    y = 9\nassert y == 9",
    ),
    "an answer without an end": Forgery("import os\ndef f(x): os.write(3, b'\\xff' * 4 + b'1' * 100); os._exit(0)"),
    "a nested answer": Forgery(CHANNEL + "def f(x):\n    forge('[\"t\",false,' + '[\"l\",' * 100000)\n    return 7"),
    "leaving": Forgery("import os\ndef f(x): os._exit(0)"),
    "raising success": Forgery("def f(x): raise SystemExit(0)"),
}
"""Each must fail its test, which the right program passes; the program's process does not decide."""
TOLD = {
    "numpy in sys.modules": Forgery(
        textwrap.dedent(
            """
            import sys, types
            np = sys.modules["numpy"] = types.SimpleNamespace(allclose=lambda *a: True)
            def f(x): return 7
            """
        ),
        "import numpy as np\nassert np.allclose(f(3), 9)",
    ),
    "unittest.TestCase.assertEqual": Forgery(
        WRONG + "import unittest\nunittest.TestCase.assertEqual = lambda *a: None",
        "import unittest\nunittest.TestCase().assertEqual(f(3), 9)",
    ),
    "two objects of the program": Forgery(of_object(EQUALS) + "\ng = f", "assert f(3) == g(3)", "f = g = abs"),
    "a test that cannot be split": Forgery(
        of_object(EQUALS), "class Case:\n    def run(self): assert f(3) == 9\nCase().run()"
    ),
}
"""These pass, or may: the verdict says that the program's process has decided."""


@pytest.fixture(scope="module")
def forged(sandbox: Sandbox) -> dict[str, tuple[Verdicts, Verdicts]]:
    """Verdicts on the forgery and on the right program; they run two at a time."""
    runs = {
        name: (
            sandbox.run_asserts(forgery.program, [forgery.test], PLENTY_S),
            sandbox.run_asserts(forgery.right, [forgery.test], PLENTY_S),
        )
        for name, forgery in (FORGERIES | TOLD).items()
    }
    return {name: (wrong.result(), right.result()) for name, (wrong, right) in runs.items()}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_does_not_pass(name: str, forged: dict[str, tuple[Verdicts, Verdicts]]) -> None:
    """What a policy finds once, it does in every answer afterwards."""
    wrong, right = forged[name]
    assert (wrong.results, right.results) == ([0], [1])
    assert (wrong.in_process, right.in_process) == ([0], [0])


@pytest.mark.parametrize("name", TOLD)
def test_what_can_be_forged_is_told(name: str, forged: dict[str, tuple[Verdicts, Verdicts]]) -> None:
    """A run can then see how much of its reward rests on such tests."""
    wrong, right = forged[name]
    assert right.results == [1] and wrong.in_process == [1]


@pytest.mark.slow
def test_data_that_is_slow_to_compare_is_bounded(sandbox: Sandbox) -> None:
    """Keys with equal hashes take hours to put into a set; the test has then failed, and the service goes on."""
    numbers = ",".join(f'["i","{n * (2**61 - 1):x}"]' for n in range(200_000))
    program = f'{CHANNEL}DATA = \'["t",false,["s",{numbers}]]\'\ndef f(x): forge(DATA)'
    assert sandbox.run_asserts(program, [EQUAL, EQUAL], PLENTY_S).result().results == [0, 0]
    assert sandbox.run_asserts("def f(x): return 9", [EQUAL], PLENTY_S).result().results == [1]


def test_there_are_at_least_fifty() -> None:
    """A table that shrinks unnoticed proves less every time."""
    assert len(FORGERIES) >= 50
