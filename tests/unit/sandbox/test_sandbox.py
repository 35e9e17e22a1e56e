"""Verdicts of harmless programs, and what bounds a run. The cases are those on which Open Instruct's service agrees."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from mgrpo.sandbox.cases import StdioTest
from mgrpo.sandbox.sandbox import Sandbox, client_limit_s, run_limit_s
from mgrpo.sandbox.walled import SandboxError
from tests.namespaces import skip_without_namespaces

# Far more than any of these programs needs, on a machine that does other things.
PLENTY_S = 20.0


def asserts(sandbox: Sandbox, program: str, *tests: str, limit_s: float = PLENTY_S) -> list[int]:
    return sandbox.run_asserts(program, tests, limit_s).result().results


def stdio(sandbox: Sandbox, program: str, *tests: tuple[str, str], limit_s: float = PLENTY_S) -> list[int]:
    return sandbox.run_stdio(program, [StdioTest(*test) for test in tests], limit_s).result().results


ASSERT_CASES = {
    "each test for itself": (
        "def f(x): return x + 1",
        {"assert f(1) == 2": 1, "assert f(1) == 3": 0, "f('a')": 0, "f(1)": 1},
    ),
    "several lines": ("def f(x): return x", {"y = f(1)\nassert y == 1": 1, "y = f(1)\nassert y == 2": 0}),
    "an empty test": ("", {"": 1, "assert x": 0}),
    "no state between tests": (
        "x = []\ndef f():\n  x.append(1)\n  return len(x)",
        {"assert f() == 1": 1, "assert f() == 1 ": 1},
    ),
    "a loop in one test": ("def f():\n  while True: pass", {"f()": 0, "assert True": 1}),
    "a program that does not compile": ("def f(:", {"assert True": 0}),
    "a program that fails": ("1 / 0", {"assert True": 0}),
    "a program that leaves": ("import sys\nsys.exit(0)", {"assert True": 0}),
    "a test that leaves": ("import sys\ndef f(): sys.exit(0)", {"f()": 0, "assert True": 1}),
    "an interrupt": ("raise KeyboardInterrupt", {"assert True": 0}),
    "not the main program": ("if __name__ == '__main__':\n  raise ValueError", {"assert True": 1}),
    "dataclasses": ("from dataclasses import dataclass\n@dataclass\nclass P:\n  x: 'int'", {"assert P(1) == P(1)": 1}),
    "no names but its own": ("def f(a: List[int]): return 1", {"assert True": 0}),
    "the usual recursion limit": ("def f(n): return 0 if n == 0 else f(n - 1)", {"f(500)": 1, "f(5000)": 0}),
    "output goes nowhere": ("print('x' * 10**6)\ndef f(): print('y'); return 3", {"assert f() == 3": 1}),
    "no input": ("def f(): return input()", {"f()": 0}),
    "files of its own": ("open('x', 'w').write('hi')\ndef f(): return open('x').read()", {"assert f() == 'hi'": 1}),
    "coroutines": ("import asyncio\nasync def f(): return 1", {"assert asyncio.run(f()) == 1": 1}),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor as T",
        {"assert list(T(2).map(abs, [-1])) == [1]": 1},
    ),
    "packages": ("import numpy as np", {"assert np.arange(3).sum() == 3": 1}),
}


@pytest.mark.parametrize("case", ASSERT_CASES)
def test_assert_tests_are_judged_one_by_one(case, sandbox):
    """One verdict a test, each in a process of its own: a test that ends or spoils its process costs no other its verdict."""
    program, expected = ASSERT_CASES[case]
    limit_s = 2.0 if "loop" in case else PLENTY_S
    assert asserts(sandbox, program, *expected, limit_s=limit_s) == list(expected.values())


STDIO_CASES = {
    "lines": ("print(int(input()) + 1)", [("1\n", "2\n", 1), ("1", "2.0", 1), ("x", "2", 0), ("1", "3", 0)]),
    "all of stdin": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", [("1 2\n3", "6", 1), ("", "0", 1)]),
    "stdin line by line": ("import sys\nfor line in sys.stdin:\n  print(line.strip())", [("a\nb", "a\nb", 1)]),
    "bytes": ("import sys\nr = sys.stdin.buffer.readline\nr()\nsys.stdout.buffer.write(r())", [("1\n2", "2", 1)]),
    "the size of stdin": ("import os\nprint(os.read(0, os.fstat(0).st_size).decode())", [("1 2", "1 2", 1)]),
    "blank lines": ("input()\nprint(input(), end='')\nprint(input())", [("x\n\ny", "y", 1)]),
    "end of input": ("try:\n  while True: print(input())\nexcept EOFError: pass", [("1\n2", "1\n2", 1)]),
    "the main program": ("def main(): print(1)\nif __name__ == '__main__': main()", [("", "1", 1)]),
    "names that data sets take for imported": ("print(Counter('aab')['a'], gcd(12, 18), sqrt(4))", [("", "2 6 2", 1)]),
    "bare streams": ("stdout.write(stdin.readline())", [("7", "7", 1)]),
    "leaving": ("print(1)\nimport sys\nsys.exit(1)\nprint(2)", [("", "1", 1)]),
    "exit and quit": ("print(1)\nexit()", [("", "1", 1)]),
    "an error after the output": ("print(1)\nraise ValueError", [("", "1", 0)]),
    "a program that does not compile": ("def f(:", [("", "", 0)]),
    "globals": ("n = 0\ndef f():\n  global n\n  n += 1\nf()\nprint(n)", [("", "1", 1)]),
    "deep recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(20000))", [("", "20000", 1)]),
    "unicode": ("print(len(input()), chr(233))", [("\u00e9\u00e9", "2 \u00e9", 1)]),
    "exit handlers": ("import atexit\natexit.register(print, 2)\nprint(1)", [("", "1\n2", 1)]),
    "threads": ("import threading\nthreading.Thread(target=print, args=(1,)).start()", [("", "1", 1)]),
    "stderr": ("import sys\nprint('e', file=sys.stderr)\nprint(1)", [("", "1", 1)]),
    "a prompt is output": ("x = input('? ')\nprint(x)", [("5", "5", 0), ("5", "? 5", 1)]),
    "much": ("print('1' * 10**6)", [("", "1" * 10**6, 1)]),
    "a loop in one test": ("if input() == 'x':\n  while True: pass\nprint(1)", [("x", "1", 0), ("y", "1", 1)]),
}


@pytest.mark.parametrize("case", STDIO_CASES)
def test_stdio_tests_run_the_program_as_a_script(case, sandbox):
    """What a program does under python FILE < INPUT is what counts, for each input for itself."""
    program, tests = STDIO_CASES[case]
    limit_s = 2.0 if "loop" in case else PLENTY_S
    assert stdio(sandbox, program, *(test[:2] for test in tests), limit_s=limit_s) == [test[2] for test in tests]


def test_a_verdict_does_not_depend_on_chance(sandbox):
    """A program that shuffles or walks a set would be right today and wrong tomorrow: noise in the reward."""
    program = "import random\nprint(random.random(), list({'a', 'b', 'c', 'd'}), hash('x'))"
    command = [sys.executable, "-c", f"import random\nrandom.seed(0)\n{program}"]
    expected = subprocess.run(command, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True).stdout
    assert stdio(sandbox, program, *[("", expected)] * 4) == [1] * 4


def test_runtimes_are_those_of_the_tests(sandbox):
    """The time penalty takes them for the test's own; a test without an end has none."""
    program = "import time\ntime.sleep(0.3)\ndef f(s): time.sleep(s)"
    verdicts = sandbox.run_asserts(program, ["f(0)", "f(0.5)", "assert False"], PLENTY_S).result()
    assert verdicts.results == [1, 1, 0]
    assert (
        0 <= verdicts.runtimes[0] < verdicts.runtimes[1] and verdicts.runtimes[1] >= 0.5 and verdicts.runtimes[2] == -1
    )
    verdicts = sandbox.run_stdio("import time\ntime.sleep(0.3)\nprint(1)", [StdioTest("", "1")], PLENTY_S).result()
    assert verdicts.results == [1] and verdicts.runtimes[0] >= 0.3


def test_time_to_load_counts_towards_the_limit(sandbox):
    """A program that precomputes for a minute is too slow, whatever its functions need."""
    assert asserts(
        sandbox, "import time\ntime.sleep(30)", "assert True", "assert True", "assert True", limit_s=1.0
    ) == [0, 0, 0]


def test_all_tests_together_end_before_the_caller_gives_up(sandbox):
    """A program that loops in every one of 1000 tests would hold a slot for a quarter of an hour, and get no score."""
    assert run_limit_s(1.0) < client_limit_s(1.0) == 30.0
    order = sandbox._order(0.2, num_tests=1000, is_stdio=True, output_bytes=0)
    assert order.run_limit_s < 30


def test_many_programs_share_the_slots(sandbox):
    """Verdicts must not be mixed up between programs that run at once."""
    runs = [sandbox.run_stdio(f"print({n})", [StdioTest("", str(n)), StdioTest("", "-")], PLENTY_S) for n in range(20)]
    assert [run.result().results for run in runs] == [[1, 0]] * 20


def test_a_closed_sandbox_leaves_no_program_running():
    """A run that ends must not wait for a program that sleeps."""
    skip_without_namespaces()
    sandbox = Sandbox(num_slots=1)
    run = sandbox.run_asserts("import time\ntime.sleep(1000)", ["assert True"], 200.0)
    waiting = sandbox.run_asserts("", ["assert True"], 200.0)
    threading.Timer(0.3, sandbox.close).start()
    with pytest.raises(SandboxError):
        run.result(timeout=60)
    assert waiting.cancelled()
