"""Judges assert tests, in a process that never runs a program: a neighbour of the program's supervisor, outside its walls.

A test runs here, and requests the program's values. The answers are plain data, or stand for an object that stays
in the program's process. Such an object equals no plain value. A test that cannot be split runs in the program's process.
"""

from __future__ import annotations

import builtins
import re
import resource
import signal
from types import TracebackType

from mgrpo.sandbox import wire
from mgrpo.sandbox.plain_data import decode, encode
from mgrpo.sandbox.plain_functions import BUILTINS, MODULES
from mgrpo.sandbox.questions import ASK, RAISES, READ, RUN
from mgrpo.sandbox.split import SplitProgram, split
from mgrpo.sandbox.wire import Wire

_CPU_S = 4.0
"""Processor time for the comparisons of one test: hostile data can make them slow."""
_MAX_ITEMS = 256
"""Items taken at once from an iterator."""
_LIBRARY = {f"{module}.{name}": value for module, names in MODULES.items() for name, value in names.items()}


def serve(supervisor: Wire, owner: Wire, memory_bytes: int) -> None:
    """Judge the tests of one program, until its supervisor ends. Afterwards this process can do nothing else."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    while True:
        try:
            kind, payload = supervisor.receive()
        except (EOFError, ConnectionError):
            return
        if kind != wire.WANT:
            owner.send(kind, payload)
            continue
        owner.send(wire.WANT)
        test = owner.expect(wire.TEST)
        # The kernel ends this process when it has used that much: no test can have passed then.
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)
        try:
            _judge(test, supervisor, owner)
        except (EOFError, ConnectionError):
            return


def _judge(test: bytes, supervisor: Wire, owner: Wire) -> None:
    parts = split(test.decode("utf-8", "surrogatepass"))
    if parts is None:
        owner.send(wire.INSIDE)
        supervisor.send(wire.TEST, test)
        return
    trial = Trial(supervisor)
    has_passed = trial.passes(parts)
    if parts.decides_inside or trial.decided_inside:
        owner.send(wire.INSIDE)
    if trial.is_over:
        owner.send(wire.FAILED, wire.timed(-1.0))
        return
    supervisor.send(wire.DONE)
    owner.send(wire.PASSED if has_passed else wire.FAILED, wire.timed(trial.seconds if has_passed else -1.0))


class ProgramLostError(BaseException):
    """The program has not answered a question."""


class Trial:
    """One test and the program that answers its questions."""

    def __init__(self, supervisor: Wire) -> None:
        self._supervisor = supervisor
        self.seconds = 0.0
        """The program's time so far."""
        self.is_over = False
        """True if the program has ended, or exceeded a limit, instead of answering."""
        self._is_lost = False
        """True if it has not answered, or not in the form of an answer."""
        self.decided_inside = False
        """True if two of the program's objects were compared, which only the program can do."""

    def passes(self, parts: SplitProgram) -> bool:
        """True if the test raises nothing."""
        names = {
            "__builtins__": dict(BUILTINS),
            ASK: self._answer,
            RUN: self.run,
            READ: self.read,
            RAISES: _Raises,
            **_LIBRARY,
        }
        try:
            exec(parts.code, names)
        except BaseException:
            return False
        return not self._is_lost  # a test may catch every exception

    def run(self, text: str, *values: object) -> None:
        """Run a statement among the program's names; or give a name its value."""
        self._answer("give" if values else "run", text, *values)

    def read(self, name: str, value: object) -> object:
        """The value of a name of the test. The program may have changed it, but only where it is mutable."""
        return value if _is_immutable(value) else self._answer("ask", name)

    def apply(self, operation: str, *values: object) -> object:
        """The value of a lambda of Python's own functions, for objects that stay with the program."""
        return self._answer("apply", operation, *values)

    def _answer(self, kind: str, text: str, *values: object) -> object:
        """The program's answer to a question; for its kinds see `untrusted_program`."""
        if self._is_lost:
            raise ProgramLostError
        request = encode((kind, text, *values), _number)
        try:
            answer = self._send(request)
            has_raised, value = _pair(decode(answer, lambda number: Opaque(self, number)))
        except Exception as err:
            self._is_lost = True
            raise ProgramLostError from err
        if has_raised is not False:
            raise _exception(value)
        return value

    def _send(self, request: bytes) -> bytes:
        self.is_over = True
        self._supervisor.send(wire.ASK, request)
        kind, payload = self._supervisor.receive()
        if kind != wire.ANSWER:
            raise EOFError("the program has ended")
        self.is_over = False
        self.seconds, answer = wire.untimed(payload)
        return answer


class Opaque:
    """An object in the program's process. The program computes all that needs the object alone."""

    def __init__(self, trial: Trial, number: int) -> None:
        self._trial, self.number = trial, number

    def __call__(self, *values: object, **named: object) -> object:
        return self._trial.apply("lambda o, values, named: o(*values, **named)", self, values, named)

    def __iter__(self) -> object:
        iterator = self._trial.apply("lambda o: iter(o)", self)
        if not isinstance(iterator, Opaque):
            raise TypeError("the program's iterator is none")
        count = 1
        while items := iterator.take(count):
            yield from items
            count = min(2 * count, _MAX_ITEMS)

    def __next__(self) -> object:
        items = self.take(1)
        if not items:
            raise StopIteration
        return items[0]

    def take(self, count: int) -> list:
        """Up to `count` items of an iterator."""
        items = self._trial.apply("lambda o, count: [item for _, item in zip(range(count), o)]", self, count)
        if not isinstance(items, list) or len(items) > count:
            raise TypeError("the program's iterator gives no items")
        return items

    def __getitem__(self, key: object) -> object:
        return self._trial.apply("lambda o, key: o[key]", self, key)

    def __hash__(self) -> int:
        return self.number


def _forward(name: str, text: str) -> None:
    """Let the program compute an operation that needs the object only."""

    def forwarded(self: Opaque, *values: object) -> object:
        return self._trial.apply(f"lambda o, *values: {text}", self, *values)

    setattr(Opaque, name, forwarded)


def _combine(name: str, sign: str, otherwise: object) -> None:
    """Let the program combine two of its objects; with plain data, which it must not receive, there is `otherwise`."""

    def combined(self: Opaque, other: object) -> object:
        if not isinstance(other, Opaque):
            return otherwise
        self._trial.decided_inside = True
        return self._trial.apply(f"lambda o, other: o {sign} other", self, other)

    setattr(Opaque, name, combined)


for _name, _text in {
    **{f"__{kind}__": f"{kind}(o)" for kind in ("bool", "len", "str", "repr", "int", "float", "complex", "abs")},
    **{"__neg__": "-o", "__pos__": "+o", "__invert__": "~o", "__reversed__": "reversed(o)"},
    **{"__round__": "round(o, *values)", "__format__": "format(o, *values)", "__index__": "o.__index__()"},
}.items():
    _forward(_name, _text)
for _name, _sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "add": "+", "sub": "-", "mul": "*"}.items():
    _combine(f"__{_name}__", _sign, NotImplemented)
for _name, _sign in {"truediv": "/", "floordiv": "//", "mod": "%", "matmul": "@", "and": "&", "or": "|"}.items():
    _combine(f"__{_name}__", _sign, NotImplemented)
_combine("__eq__", "==", False)
_combine("__ne__", "!=", True)


class _Raises:
    """`pytest.raises`."""

    def __init__(self, kinds: type | tuple[type, ...], match: str | None = None) -> None:
        self._kinds, self._match = kinds, match

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if kind is None:
            raise AssertionError("nothing was raised")
        return issubclass(kind, self._kinds) and (self._match is None or bool(re.search(self._match, str(error))))


def _pair(value: object) -> tuple[object, object]:
    if isinstance(value, tuple) and len(value) == 2:
        return value
    raise ValueError("not an answer")


def _is_immutable(value: object) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_immutable, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, range))


def _number(value: object) -> int | None:
    return value.number if isinstance(value, Opaque) else None


def _exception(value: object) -> BaseException:
    """The program's exception, as the nearest of Python's own."""
    names, message = value if isinstance(value, tuple) and len(value) == 2 else ([], "")
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            try:
                return kind(message)
            except TypeError:  # it takes more than a message
                continue
    return Exception(message)
