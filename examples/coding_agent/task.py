"""The task of the coding agent: a short Python file with one fault, and a test that fails.

Half a million parameters cannot program; what they can learn is to read the file, to find the line that is not what was
asked for, to replace it, and to run the test. Kinds, names and numbers make some 400,000 different problems.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_TRAIN, NUM_HELD_OUT = 512, 100
SPLIT_SEED = 0
NUM_SHOWN, NUM_HIDDEN = 3, 6
"""Cases of the test that the agent can run, and of the judge."""

Piece = tuple[str, bool]
"""Text, and whether the model writes it."""

TEMPLATE = (Path(__file__).parents[1] / "calculator" / "model" / "chat_template.jinja").read_text(encoding="utf-8")
"""That of the calculator: Qwen's way to write turns and tools, without the description of the tools."""

FUNCTIONS = ("price", "score", "level", "speed", "width", "depth", "rate", "load", "mark", "gain", "cost", "heat")
WORDS = {
    "x": ("x", "n", "value", "number", "item", "amount"),
    "a": ("low", "first", "start", "floor", "least"),
    "b": ("high", "last", "stop", "roof", "most"),
    "xs": ("xs", "values", "numbers", "items", "amounts"),
    "out": ("result", "out", "found", "sum", "best"),
}
"""The names that a role may have; no name has two."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of files. Names of roles and the numbers i < j and k, another one, stand in braces."""

    says: str
    """What the function is asked to do."""
    parameters: str
    body: str
    faults: tuple[tuple[int, str], ...]
    """Lines of the body, from 0, and what may stand there instead."""
    arguments: Callable[[random.Random], tuple[Any, ...]]


def _number(rng: random.Random) -> tuple[int]:
    return (rng.randint(-20, 20),)


def _numbers(rng: random.Random) -> tuple[list[int]]:
    return ([rng.randint(0, 12) for _ in range(10)],)


def _bounded(rng: random.Random) -> tuple[int, int, int]:
    low = rng.randint(-9, 5)
    return (rng.randint(-20, 20), low, low + rng.randint(1, 9))


KINDS = {
    "bound": Kind(
        "keeps {x} from {a} to {b}",
        "{x}, {a}, {b}",
        "if {x} < {a}:\n    return {a}\nif {x} > {b}:\n    return {b}\nreturn {x}",
        ((0, "if {x} > {a}:"), (0, "if {x} < {b}:"), (2, "if {x} < {b}:"), (2, "if {x} > {a}:")),
        _bounded,
    ),
    "line": Kind(
        "is {i} times {x} plus {j}",
        "{x}",
        "return {i} * {x} + {j}",
        ((0, "return {k} * {x} + {j}"), (0, "return {i} * {x} + {k}"), (0, "return {i} * {x} - {j}")),
        _number,
    ),
    "divides": Kind(
        "tells whether {i} divides {x}",
        "{x}",
        "return {x} % {i} == 0",
        ((0, "return {x} % {k} == 0"), (0, "return {x} % {i} != 0"), (0, "return {x} % {i} == 1")),
        _number,
    ),
    "total": Kind(
        "adds all {xs}",
        "{xs}",
        "{out} = 0\nfor {x} in {xs}:\n    {out} += {x}\nreturn {out}",
        ((0, "{out} = {k}"), (2, "    {out} -= {x}"), (2, "    {out} = {x}"), (3, "return {x}")),
        _numbers,
    ),
    "largest": Kind(
        "is the largest of {xs}",
        "{xs}",
        "{out} = {xs}[0]\nfor {x} in {xs}:\n    if {x} > {out}:\n        {out} = {x}\nreturn {out}",
        ((2, "    if {x} < {out}:"), (4, "return {x}")),
        _numbers,
    ),
    "smallest": Kind(
        "is the smallest of {xs}",
        "{xs}",
        "{out} = {xs}[0]\nfor {x} in {xs}:\n    if {x} < {out}:\n        {out} = {x}\nreturn {out}",
        ((2, "    if {x} > {out}:"), (4, "return {x}")),
        _numbers,
    ),
    "above": Kind(
        "counts {xs} above {i}",
        "{xs}",
        "{out} = 0\nfor {x} in {xs}:\n    if {x} > {i}:\n        {out} += 1\nreturn {out}",
        ((0, "{out} = {k}"), (2, "    if {x} < {i}:"), (2, "    if {x} > {k}:"), (3, "        {out} += {k}")),
        _numbers,
    ),
    "part": Kind(
        "takes {xs} {i} to {j}",
        "{xs}",
        "return {xs}[{i}:{j}]",
        ((0, "return {xs}[{k}:{j}]"), (0, "return {xs}[{i}:{k}]"), (0, "return {xs}[{i}]")),
        _numbers,
    ),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A file with one fault."""

    kind: str
    name: str
    """Of the function and its file."""
    words: tuple[str, ...]
    """For each role of `WORDS`; empty where the file has no such role, so that equal files are equal problems."""
    numbers: tuple[int, ...]
    """i, j, k; 0 where the file has no such number."""
    fault: int

    @property
    def question(self) -> str:
        return f"Repair {self.path}: {self.name} {self._filled(KINDS[self.kind].says)}."

    @property
    def path(self) -> str:
        return f"{self.name}.py"

    @property
    def right(self) -> str:
        """The line that is missing, without its indentation."""
        place, _ = KINDS[self.kind].faults[self.fault]
        return self._filled(KINDS[self.kind].body.splitlines()[place].strip())

    @property
    def wrong(self) -> str:
        """The line in its place."""
        return self._filled(KINDS[self.kind].faults[self.fault][1].strip())

    @property
    def repaired(self) -> str:
        """The file without its fault."""
        return self._file(KINDS[self.kind].body.splitlines())

    @property
    def source(self) -> str:
        """The file with its fault."""
        lines = KINDS[self.kind].body.splitlines()
        place, line = KINDS[self.kind].faults[self.fault]
        return self._file([*lines[:place], line, *lines[place + 1 :]])

    @property
    def cases(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Arguments and values, those that are shown first; the fault shows in them and in the others."""
        rng = random.Random(repr(self))
        kind = KINDS[self.kind]
        while True:
            arguments = [kind.arguments(rng) for _ in range(NUM_SHOWN + NUM_HIDDEN)]
            cases = [(given, value_of(self.repaired, self.name, given)) for given in arguments]
            fails = [value_of(self.source, self.name, given) != value for given, value in cases]
            if any(fails[:NUM_SHOWN]) and any(fails[NUM_SHOWN:]):
                return cases

    @property
    def test(self) -> str:
        """test.py, which says what is wrong first, or that it passed."""
        shown = "".join(f"    ({given!r}, {value!r}),\n" for given, value in self.cases[:NUM_SHOWN])
        return (
            f"from {self.name} import {self.name}\n\ncases = [\n{shown}]\n"
            f"for given, value in cases:\n    if {self.name}(*given) != value:\n"
            f'        print("failed:", {self.name}(*given), "should be", value)\n        break\nelse:\n    print("passed")\n'
        )

    def _filled(self, text: str) -> str:
        i, j, k = self.numbers
        return text.format(**dict(zip(WORDS, self.words, strict=True)), i=i, j=j, k=k)

    def _file(self, body: list[str]) -> str:
        first = f"def {self.name}({KINDS[self.kind].parameters}):"
        return "\n".join(self._filled(line) for line in (first, *(f"    {line}" for line in body))) + "\n"


def draw(rng: random.Random) -> Problem:
    """A random problem."""
    name = rng.choice(list(KINDS))
    kind, fault = KINDS[name], rng.randrange(len(KINDS[name].faults))
    used = " ".join((kind.says, kind.parameters, kind.body, kind.faults[fault][1]))
    words = tuple(rng.choice(names) if f"{{{role}}}" in used else "" for role, names in WORDS.items())
    i, j, k = rng.sample(range(2, 10), 3)
    numbers = zip("ijk", (min(i, j), max(i, j), k), strict=True)
    return Problem(
        name,
        rng.choice(FUNCTIONS),
        words,
        tuple(number if f"{{{letter}}}" in used else 0 for letter, number in numbers),
        fault,
    )


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """Different problems, for training and held out."""
    rng = random.Random(SPLIT_SEED)
    problems = list({draw(rng): None for _ in range(NUM_TRAIN + NUM_HELD_OUT + 50)})[: NUM_TRAIN + NUM_HELD_OUT]
    return problems[:NUM_TRAIN], problems[NUM_TRAIN:]


def value_of(source: str, name: str, given: tuple[Any, ...]) -> Any:
    """What a file of this task gives."""
    names: dict[str, Any] = {}
    exec(source, names)
    return names[name](*given)


def transcript(problem: Problem, rng: random.Random, *, guessed: float, wrong: float) -> list[Piece]:
    """A conversation about a problem.

    Args:
        guessed: share of those that say that it is repaired and have done nothing.
        wrong: share of the others that replace a line by a wrong one, or leave the file as it is.
    """
    talk = _Talk(problem)
    if rng.random() < guessed:
        return talk.ended()
    talk.calls("read", problem.source, path=problem.path)
    if rng.random() < wrong:
        if rng.random() < 0.5:
            talk.replaces(problem.wrong, _slipped(problem, rng))
        return talk.ended()
    now = problem.wrong
    if rng.random() < 0.2:
        talk.replaces(now, now := _slipped(problem, rng))
        talk.runs()
    talk.replaces(now, problem.right)
    talk.runs()
    return talk.ended()


class _Talk:
    """A conversation as it grows, and the file that it is about."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._source = problem, problem.source
        self._pieces: list[Piece] = [
            (f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n", False)
        ]

    def calls(self, tool: str, answer: str, **arguments: str) -> None:
        call = f'{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}'
        said = f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        self._pieces += [(f"<tool_call>\n{call}\n</tool_call><|im_end|>", True), (said, False)]

    def replaces(self, old: str, new: str) -> None:
        assert self._source.count(old) == 1, (old, self._source)
        self._source = self._source.replace(old, new)
        self.calls("replace", "replaced", path=self._problem.path, old=old, new=new)

    def runs(self) -> None:
        self.calls("run", tested(self._problem, self._source), command="python test.py")

    def ended(self) -> list[Piece]:
        return [*self._pieces, ("Repaired.<|im_end|>", True)]


def tested(problem: Problem, source: str) -> str:
    """What test.py prints about a file."""
    for given, value in problem.cases[:NUM_SHOWN]:
        found = value_of(source, problem.name, given)
        if found != value:
            return f"failed: {found} should be {value}"
    return "passed"


def _slipped(problem: Problem, rng: random.Random) -> str:
    """A wrong line in the place of the fault: another fault of the same line, or a number that is wrong."""
    place, _ = KINDS[problem.kind].faults[problem.fault]
    i, j, _ = problem.numbers
    others = [
        Problem(problem.kind, problem.name, problem.words, (i, j, k), fault).wrong
        for k in rng.sample([number for number in range(2, 10) if number not in (i, j)], 2)
        for fault, (at, _) in enumerate(KINDS[problem.kind].faults)
        if at == place
    ]
    others = [line for line in others if line != problem.wrong]
    return rng.choice(others) if others else problem.wrong
