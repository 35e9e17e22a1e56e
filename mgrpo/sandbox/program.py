"""The last of our code before an untrusted program: it takes over a fresh process, runs the program, and never returns.

An assert test shares the interpreter with the program, so a program that knows this file can forge its verdict. Simple
tricks fail: the test, and the secret that the verdict must contain, arrive only after the program's top level has
ended, everything used after that is looked up before the program starts, and builtins are restored. The verdict of a
stdio test is decided outside, from the output.
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
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import NoReturn, TextIO

FAILED_TO_LOAD = 3
"""Exit status of a program whose top level fails in an assert test, or that does not compile."""
FAILED = 1
_TEST_HEAD = struct.Struct("<16sI")
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
    channel.sendall(_TEST_HEAD.pack(secret, len(test)) + test)


def prepare_names() -> None:
    """Look up the names that scripts find predefined, before the first script runs."""
    for name in _STAR_MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
        _star_names.update((key, getattr(module, key)) for key in public)
    _star_names.update((name, sys.modules[name]) for name in _MODULES)


def _run_assert(source: str, channel: int, token: bytes) -> NoReturn:
    """Run the top level, request the test, run it among the program's names, and report whether it raised nothing."""
    read, write, leave, clock, execute, compiled = os.read, os.write, os._exit, time.perf_counter, exec, compile
    unpack, pack, untrace, unprofile = _TEST_HEAD.unpack, VERDICT.pack, sys.settrace, sys.setprofile
    whole, put_back, true_builtins = bytearray, builtins.__dict__.update, dict(builtins.__dict__)
    head_size = _TEST_HEAD.size
    module = ModuleType("program")
    sys.modules["program"] = module
    names = module.__dict__
    names["__builtins__"] = builtins
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
        data = whole()
        while len(data) < head_size:
            data += read(channel, head_size - len(data)) or leave(FAILED)
        secret, length = unpack(data)
        data = whole()
        while len(data) < length:
            data += read(channel, length - len(data)) or leave(FAILED)
        test = data.decode("utf-8", "surrogatepass")
        started = clock()
        execute(compiled(test, "<test>", "exec", 0, True), names)
        write(channel, pack(secret, clock() - started))
    except BaseException:
        leave(FAILED)
    leave(0)


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
    """Run the code and what an interpreter does after it: join threads, call exit handlers, flush. Exit status."""
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
