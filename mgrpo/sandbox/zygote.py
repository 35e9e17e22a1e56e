"""A process inside walls: it sets them up once, then forks a supervisor for each program or kernel of its owner's.

It runs without the site module and its owner's environment, and ends with its owner. In the process of a program the
calls return to `main` before the program starts, so that no frame above the program holds any of our data.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import site
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from mgrpo.processes.lifetime import adopt_orphans, die_with_parent
from mgrpo.sandbox import judge, linux, wire
from mgrpo.sandbox.interpreter import Interpreter
from mgrpo.sandbox.paths import inner_path
from mgrpo.sandbox.seccomp import filter_program
from mgrpo.sandbox.session import Session, SessionBounds
from mgrpo.sandbox.supervision import Cell, reap_descendants, remove_folder
from mgrpo.sandbox.supervisor import Order, Supervisor
from mgrpo.sandbox.untrusted_program import Job, prepare_names
from mgrpo.sandbox.walls import enter_private_root, enter_user_namespace, forbid_namespaces, is_forbidden
from mgrpo.sandbox.wire import Wire

_KILLED = 128
"""Exit status that stands for any signal: the supervisor was killed, which its own errors would not do."""
Walls = Literal["user", "root", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings of a process inside walls."""

    descriptor: int
    """File descriptor of its connection to the owner."""
    walls: Walls
    readable: tuple[str, ...]
    """Files and folders that a program may read; links remain links."""
    search_path: tuple[str, ...]
    """The program's `sys.path`, by the names that it has for these paths."""
    first_program_id: int
    num_program_ids: int
    scratch: str
    serves_kernels: bool
    """Many kernels at a time, each for any number of calls; otherwise one program after the other."""

    @property
    def program_ids(self) -> range:
        return range(self.first_program_id, self.first_program_id + self.num_program_ids)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Setup:
        return cls(**json.loads(text))


def main(setup: Setup) -> None:
    """Serve the owner until it disconnects; in a program's process, run the program."""
    owner = Wire(socket.socket(fileno=setup.descriptor))
    try:
        cell = _raise_walls(setup)
        die_with_parent()
        linux.set_dumpable(False)
        _reset_interpreter(setup.search_path)
    except OSError as err:
        owner.send(wire.FORBIDDEN if is_forbidden(err) else wire.BROKEN, str(err).encode())
        return
    except Exception as err:
        owner.send(wire.BROKEN, f"{type(err).__name__}: {err}".encode())
        return
    # A garbage collection after a fork would write to, and so copy, every shared page.
    gc.collect()
    gc.freeze()
    gc.disable()
    owner.send(wire.READY)
    job = _serve_kernels(cell, owner, setup.program_ids) if setup.serves_kernels else _serve(cell, owner)
    del cell, owner, setup
    if job is not None:
        gc.enable()
        job.run()


def _raise_walls(setup: Setup) -> Cell:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)  # a program, which is another user, must be able to enter the folders that are made here
    try:
        system_calls = filter_program()
    except (OSError, AttributeError):
        system_calls = None
    if setup.walls == "user":
        enter_user_namespace(setup.program_ids)
    if setup.walls != "none":
        enter_private_root(setup.readable)
    if setup.walls == "user":
        forbid_namespaces()
    has_walls = setup.walls != "none"
    if has_walls:
        linux.drop_bounding_set()
        _move_modules()
    else:
        adopt_orphans()
    return Cell(has_walls=has_walls, scratch=setup.scratch, program_id=setup.first_program_id, filter=system_calls)


def _serve(cell: Cell, owner: Wire) -> Job | None:
    """Run one program after the other. Returns None when the owner disconnects; in a program's process, its job."""
    while True:
        try:
            order = Order.read(owner.expect(wire.ORDER))
            source = owner.expect(wire.SOURCE).decode("utf-8", "surrogatepass")
        except (EOFError, ConnectionError):
            return None
        pid = os.fork()
        if pid == 0:
            return _supervise(cell, order, source, owner)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not cell.has_walls:
            reap_descendants()
            remove_folder(cell.scratch)
        owner.send(wire.OVER if ended in (0, _KILLED) or ended < 0 else wire.BROKEN)


def _serve_kernels(cell: Cell, owner: Wire, program_ids: range) -> Interpreter | None:
    """Fork a supervisor for each kernel. Returns None when the owner disconnects; in an interpreter's process, its job."""
    for number in itertools.count():
        try:
            bounds = SessionBounds.read(owner.expect(wire.OPEN))
            connection = owner.receive_end()
        except (EOFError, ConnectionError):
            break
        try:
            pid = os.fork()
        except OSError:  # no more processes or memory: this kernel is lost to its owner, the others are not
            connection.close()
            continue
        if pid == 0:
            owner.close()
            scratch = cell.scratch if cell.has_walls else f"{cell.scratch}-{number}"
            program_id = program_ids[number % len(program_ids)]
            return _supervise_kernel(replace(cell, scratch=scratch, program_id=program_id), bounds, Wire(connection))
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    if not cell.has_walls:
        reap_descendants()
    return None


def _supervise(cell: Cell, order: Order, source: str, owner: Wire) -> Job:
    """Supervise one program, then exit; returns only in a program's process, with its job."""
    with _exiting_on_errors():
        _enter_own_namespaces(cell)
        owner = _fork_supervisor(owner, order)
        die_with_parent()
        job = Supervisor(cell, order, source, owner).supervise()
        if job is None:
            os._exit(0)
    return job


def _supervise_kernel(cell: Cell, bounds: SessionBounds, owner: Wire) -> Interpreter:
    """Supervise one kernel, then exit; returns only in an interpreter's process, with its job."""
    with _exiting_on_errors():
        _enter_own_namespaces(cell)
        if cell.has_walls:
            # Sockets count as memory: those of this kernel are told from others' by a network of its own.
            linux.unshare(linux.CLONE_NEWNET)
        pid = os.fork()
        if pid != 0:
            # The kernel ends its child with this process, which the child's own end must not leave behind.
            owner.close()
            os.waitpid(pid, 0)
            os._exit(0)
        die_with_parent()
        job = Session(cell, bounds, owner).supervise()
    return job


@contextlib.contextmanager
def _exiting_on_errors() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        # The owner is gone, with everyone who would read a verdict.
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _enter_own_namespaces(cell: Cell) -> None:
    die_with_parent()
    # When memory runs out, the kernel ends these processes first.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if cell.has_walls:
        # Only children enter a new PID namespace; the first one is the supervisor.
        linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)


def _move_modules() -> None:
    """Make loaded modules find their files and submodules within the walls."""
    for module in list(sys.modules.values()):
        for holder, names in (
            (module, ("__file__", "__cached__")),
            (getattr(module, "__spec__", None), ("origin", "cached")),
        ):
            for name in names:
                if isinstance(path := getattr(holder, name, None), str) and path.startswith("/"):
                    setattr(holder, name, inner_path(path))
        if hasattr(module, "__path__"):
            module.__path__[:] = map(inner_path, module.__path__)


def _fork_supervisor(owner: Wire, order: Order) -> Wire:
    """Returns in the child, with its wire. This process judges assert tests, and exits as the child does.

    The judge keeps the tests to itself: a program could otherwise find their text in the memory that it starts with.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        if order.is_stdio:
            theirs.close()
            return owner
        owner.close()
        return Wire(theirs)
    theirs.close()
    if not order.is_stdio:
        judge.serve(Wire(ours), owner, order.memory_bytes)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(status if status >= 0 else _KILLED)


def _reset_interpreter(search_path: Sequence[str]) -> None:
    """Make the interpreter look as it does to a plain script, without our modules."""
    sys.path[:] = search_path
    sys.argv = ["program.py"]
    site.setquit()
    prepare_names()
    for name in [name for name in sys.modules if name.partition(".")[0] == "mgrpo"]:
        del sys.modules[name]
