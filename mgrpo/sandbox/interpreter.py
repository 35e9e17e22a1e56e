"""The last of our code before the code of a kernel: it executes one piece after the other among the same names.

The code can change anything here. By that it changes its own answer only: time, memory and the length of an answer are
bounded by the supervisor, which starts another interpreter where this one stops responding.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import os
import random
import signal
import struct
import sys
import traceback
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from mgrpo.sandbox.clipped import Clipped
from mgrpo.sandbox.wire import FAILED, PASSED

HEAD = struct.Struct("<BI")
"""The head of code and of answers: the kind and the length, as in frames of a `Wire`."""
_OWN_FILE = __file__


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The program of a kernel's fresh process."""

    channel: int
    """Descriptor of the connection to the supervisor."""
    output_bytes: int
    """Length limit of errors."""

    def run(self) -> NoReturn:
        """Execute code until the supervisor ends the process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        random.seed(0)
        sys.path.insert(0, "")
        # Those of the site module also close stdin.
        vars(builtins).update(exit=sys.exit, quit=sys.exit)
        module = ModuleType("__main__")
        vars(module)["__builtins__"] = builtins
        sys.modules["__main__"] = module
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            stream = open(descriptor, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
        _serve(self.channel, self.output_bytes, vars(module))


def _serve(channel: int, output_bytes: int, names: dict[str, Any]) -> NoReturn:
    """Everything used between two pieces of code is looked up before the first, which may replace it."""
    read, write, leave, process, unpack, pack = os.read, os.write, os._exit, os.getpid, HEAD.unpack, HEAD.pack
    run, suppress, everything, clip, size = _error_of, contextlib.suppress, BaseException, Clipped, HEAD.size
    own, number, whole, length_of = process(), 0, bytearray, len
    while True:
        data = whole()
        while length_of(data) < size:
            data += read(channel, size - length_of(data)) or leave(0)
        length = unpack(data)[1]
        data = whole()
        while length_of(data) < length:
            data += read(channel, length - length_of(data)) or leave(0)
        number += 1
        error = run(data.decode("utf-8", "surrogatepass"), f"<cell {number}>", names)
        with suppress(everything):
            sys.stdout.flush()
            sys.stderr.flush()
        if process() != own:  # a fork of the code's has come to the end of it
            leave(0)
        clipped = clip(output_bytes)
        clipped.add(error.encode("utf-8", "backslashreplace"))
        text = clipped.text().encode()
        reply = pack(FAILED if error else PASSED, length_of(text)) + text
        while reply:
            reply = reply[write(channel, reply) :]


def _error_of(code: str, filename: str, names: dict[str, Any]) -> str:
    """Execute the code; its uncaught exception as Python prints it, or nothing. One interrupt may come at any point of it."""
    lines = [f"{line}\n" for line in code.split("\n")]
    linecache.cache[filename] = (len(code), None, lines, filename)
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _execute(code, filename, names)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException as err:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if isinstance(err, SystemExit) and err.code in (None, 0):
            return ""
        return _explained(err)
    return ""


def _execute(code: str, filename: str, names: dict[str, Any]) -> None:
    """Statements, then a last expression, whose value is shown as at Python's prompt."""
    tree = compile(code, filename, "exec", ast.PyCF_ONLY_AST, True)
    assert isinstance(tree, ast.Module)
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    exec(compile(tree, filename, "exec", 0, True), names)
    exec(compile(ast.Interactive(last), filename, "single", 0, True), names)


def _explained(err: BaseException) -> str:
    try:
        frames = err.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == _OWN_FILE:
            frames = frames.tb_next
        return "".join(traceback.format_exception(type(err), err, frames))
    except BaseException:  # no memory is left for more, or the exception's own methods raise
        return f"{type(err).__name__}\n"
