"""The last of our code before an untrusted program: it takes over a fresh process, runs the program, and never returns.

The decision is made elsewhere: from the output of a stdio test, or the answers to the questions of an assert test. An
assert test that cannot be split runs here, among the program's names, so a program written for this file can forge its
verdict. Simple tricks fail: the test, and the secret that the verdict must contain, arrive only after the program's top
level has ended, everything used after that is looked up before the program starts, and builtins are restored.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import os
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, NoReturn, TextIO

from mgrpo.sandbox.plain_data import MAX_BYTES, NotPlainError, decode, encode

FAILED_TO_LOAD = 3
"""Exit status of a program whose top level fails in an assert test, or that does not compile."""
FAILED = 1
_TEST, _QUESTION = b"t?"
_HEAD = struct.Struct("<BI")
"""The head of a message to an assert test's process: the kind and the length."""
_ANSWER_HEAD = struct.Struct("<I")
_SECRET_BYTES = 16
VERDICT = struct.Struct("<16sd")
"""Sent by an assert test that passes: the secret that came with it, and its seconds."""

_STAR_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
"""Modules that programs of code data sets assume imported, in Open Instruct's order: later names hide earlier ones."""
_MODULES = _STAR_MODULES[:-2]
_RECURSION_LIMIT = 50_000
_star_names: dict[str, object] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The program that a fresh process runs, and its channel to the supervisor."""

    source: str
    channel: int | None
    """Descriptor of the connection to the supervisor in an assert test; None in a stdio test."""
    token: bytes
    """Sent over the channel when the program's top level has ended."""

    def run(self) -> NoReturn:
        """Run the program; the process ends with it."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        random.seed(0)
        if self.channel is None:
            _run_script(self.source)
        else:
            _run_assert(self.source, self.channel, self.token)


def pass_test(channel: socket.socket, secret: bytes, test: bytes) -> None:
    """Send the test to a program whose top level has ended. The supervisor's side of `_run_assert`."""
    channel.sendall(_HEAD.pack(_TEST, len(secret) + len(test)) + secret + test)


def put_question(channel: socket.socket, question: bytes) -> None:
    """Send a question to a program whose top level has ended. The supervisor's side of `_Answers`."""
    channel.sendall(_HEAD.pack(_QUESTION, len(question)) + question)


def receive_answer(receive: Callable[[int], bytes]) -> bytes | None:
    """The program's answer; None where `receive` gives less than requested, or the answer is too long."""
    head = receive(_ANSWER_HEAD.size)
    if len(head) < _ANSWER_HEAD.size:
        return None
    (length,) = _ANSWER_HEAD.unpack(head)
    answer = receive(length) if length <= MAX_BYTES else b""
    return answer if len(answer) == length else None


def prepare_names() -> None:
    """Look up the names that scripts find predefined, before the first script runs."""
    for name in _STAR_MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
        _star_names.update((key, getattr(module, key)) for key in public)
    _star_names.update((name, sys.modules[name]) for name in _MODULES)


def _run_assert(source: str, channel: int, token: bytes) -> NoReturn:
    """Run the top level, then answer questions, or run a test among the program's names and report its verdict."""
    read, write, leave, clock, execute, compiled = os.read, os.write, os._exit, time.perf_counter, exec, compile
    unpack, pack, untrace, unprofile = _HEAD.unpack, VERDICT.pack, sys.settrace, sys.setprofile
    whole, put_back, true_builtins = bytearray, builtins.__dict__.update, dict(builtins.__dict__)
    head_size, secret_size, question, pack_length = _HEAD.size, _SECRET_BYTES, _QUESTION, _ANSWER_HEAD.pack
    module = ModuleType("program")
    sys.modules["program"] = module
    names = module.__dict__
    names["__builtins__"] = builtins
    answer = _Answers(names).answer
    try:
        execute(compiled(source, "<program>", "exec", 0, True), names)
    except BaseException:
        leave(FAILED_TO_LOAD)
    try:
        untrace(None)
        unprofile(None)
        put_back(true_builtins)
        names["__builtins__"] = builtins
        write(channel, token)
        while True:
            data = whole()
            while len(data) < head_size:
                data += read(channel, head_size - len(data)) or leave(FAILED)
            kind, length = unpack(data)
            data = whole()
            while len(data) < length:
                data += read(channel, length - len(data)) or leave(FAILED)
            if kind != question:
                break
            reply = answer(bytes(data))
            reply = pack_length(len(reply)) + reply
            while reply:
                reply = reply[write(channel, reply) :]
        test = data[secret_size:].decode("utf-8", "surrogatepass")
        started = clock()
        execute(compiled(test, "<test>", "exec", 0, True), names)
        write(channel, pack(data[:secret_size], clock() - started))
    except BaseException:
        leave(FAILED)
    leave(0)


class _Answers:
    """Answers questions among the program's names. It may return anything: the decision is made elsewhere."""

    def __init__(self, names: dict[str, object]) -> None:
        self._names: dict[str, Any] = names
        self._objects: list[object] = []
        """Objects that are not plain data, by number."""

    def answer(self, question: bytes) -> bytes:
        """Encoded pair: False and the value; or True, with the names of the exception's classes and its message."""
        try:
            value = self._value(*decode(question, self._objects.__getitem__))
        except BaseException as err:
            kinds = [kind.__name__ for kind in type(err).__mro__]
            try:
                message = str(err)
            except BaseException:
                message = ""
            return encode((True, (kinds, message)), self._keep)
        try:
            return encode((False, value), self._keep)
        except (NotPlainError, RecursionError, TypeError, AttributeError, ValueError):
            return encode((False, _Unreadable(self._keep(value))), self._keep)

    def _value(self, kind: str, text: str, *values: Any) -> object:
        """Value by kind: `run` a statement, `give` a name its value, `ask` for an expression's value, or its `str` or `repr`,
        `apply` a lambda of Python's own functions. With values an expression is a lambda of them.
        """
        if kind == "run":
            exec(compile(text, "<test>", "exec", 0, True), self._names)
            return None
        if kind == "give":
            (self._names[text],) = values
            return None
        value = eval(compile(text, "<test>", "eval", 0, True), {} if kind == "apply" else self._names)
        if values:
            value = value(*values)
        if kind == "str":
            return str(value)
        return repr(value) if kind == "repr" else value

    def _keep(self, value: object) -> int:
        if type(value) is _Unreadable:
            return value.number
        self._objects.append(value)
        return len(self._objects) - 1


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a value that cannot leave the process, because it is too large or too deep, or raises when read."""

    number: int


def _run_script(source: str) -> NoReturn:
    """Run the source as a script with stdin and stdout. SystemExit counts as a normal end."""
    streams = {
        "stdin": open(0, encoding="utf-8", errors="surrogatepass", closefd=False),  # noqa: SIM115
        "stdout": open(1, "w", encoding="utf-8", errors="surrogatepass", closefd=False),  # noqa: SIM115
        "stderr": open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False),  # noqa: SIM115
    }
    module = ModuleType("__main__")
    vars(module).update(_star_names, **streams, __builtins__=builtins)
    sys.modules["__main__"] = module
    for name, stream in streams.items():
        setattr(sys, name, stream)
    sys.setrecursionlimit(_RECURSION_LIMIT)
    try:
        code = compile(source, "<program>", "exec", dont_inherit=True)
    except BaseException:
        os._exit(FAILED_TO_LOAD)
    os._exit(_run_to_exit(code, vars(module), (sys.stdout, streams["stdout"])))


def _run_to_exit(code: CodeType, names: dict[str, object], outputs: tuple[TextIO, TextIO]) -> int:
    """Run the code and the interpreter's steps after it: join threads, call exit handlers, flush. Exit status."""
    status = 0
    try:
        exec(code, names)
    except SystemExit:
        pass
    except BaseException:
        status = FAILED
    with contextlib.suppress(BaseException):
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
    for output in (sys.stdout, *outputs):
        with contextlib.suppress(BaseException):
            output.flush()
    return status
