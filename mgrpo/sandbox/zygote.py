"""The process of a slot: it raises the walls once, then forks a supervisor for each program that its owner sends.

It runs without the site module, with nothing of its owner's environment, and ends with its owner. In the process of a program
the calls return, down to `main`, before the program begins: then no frame above it holds anything of ours.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import site
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mgrpo.processes.lifetime import adopt_orphans, die_with_parent
from mgrpo.sandbox import kernel, wire
from mgrpo.sandbox.program import Job, prepare_names
from mgrpo.sandbox.seccomp import filter_program
from mgrpo.sandbox.supervisor import Cell, Order, Supervisor, hunt_down_children, remove_folder
from mgrpo.sandbox.walls import enter_private_root, enter_user_namespace, forbid_namespaces
from mgrpo.sandbox.wire import Wire

_KILLED = 128
"""Exit status in place of a signal's number: the supervisor was killed, which its own errors would not do."""
Walls = Literal["user", "root", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a slot's process is told when it is started."""

    descriptor: int
    """Its end of the talk with the owner."""
    walls: Walls
    readable: tuple[str, ...]
    """Files and folders that a program may read, links among them as links."""
    search_path: tuple[str, ...]
    """The program's `sys.path`."""
    program_id: int
    scratch: str

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Plan:
        return cls(**json.loads(text))


def main(plan: Plan) -> None:
    """Serve the owner until it is gone; in a program's process, run the program."""
    owner = Wire(socket.socket(fileno=plan.descriptor))
    try:
        cell = _raise_walls(plan)
    except OSError as err:
        owner.send(wire.BROKEN, str(err).encode())
        return
    die_with_parent()
    kernel.set_dumpable(False)
    _look_like_a_script(plan.search_path)
    # Whatever is done here is done once; what a fork touches is copied. The collector touches everything.
    gc.collect()
    gc.freeze()
    gc.disable()
    owner.send(wire.READY)
    job = _serve(cell, owner)
    del cell, owner, plan
    if job is not None:
        gc.enable()
        job.run()


def _raise_walls(plan: Plan) -> Cell:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        system_calls = filter_program()
    except (OSError, AttributeError):
        system_calls = None
    if plan.walls == "user":
        enter_user_namespace(plan.program_id)
    if plan.walls != "none":
        enter_private_root(plan.readable)
    if plan.walls == "user":
        forbid_namespaces()
    has_walls = plan.walls != "none"
    if has_walls:
        kernel.drop_bounding_set()
    else:
        adopt_orphans()
    return Cell(has_walls=has_walls, scratch=plan.scratch, program_id=plan.program_id, filter=system_calls)


def _serve(cell: Cell, owner: Wire) -> Job | None:
    """Run one program after the other. None when the owner is gone; in a program's process, its job."""
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
            hunt_down_children()
            remove_folder(cell.scratch)
        owner.send(wire.OVER if ended in (0, _KILLED) or ended < 0 else wire.BROKEN)


def _supervise(cell: Cell, order: Order, source: str, owner: Wire) -> Job:
    """Be the supervisor of one program, and end with it; returns only in a program's process, with its job."""
    try:
        die_with_parent()
        # When memory runs out the kernel ends these processes, not ours.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        if cell.has_walls:
            # Only children enter a new namespace of processes: the first one is the supervisor.
            kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
            pid = os.fork()
            if pid != 0:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os._exit(status if status >= 0 else _KILLED)
            die_with_parent()
        job = Supervisor(cell, order, source, owner).supervise()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if job is None:
        os._exit(0)
    return job


def _look_like_a_script(search_path: Sequence[str]) -> None:
    """A program finds the interpreter as a script of its own would, and nothing of ours by name."""
    sys.path[:] = search_path
    sys.argv = ["program.py"]
    site.setquit()
    prepare_names()
    for name in [name for name in sys.modules if name.partition(".")[0] == "mgrpo"]:
        del sys.modules[name]
