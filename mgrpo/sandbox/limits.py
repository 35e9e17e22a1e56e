"""Resource limits of one process of a program. The supervisor limits the sum over its processes."""

from __future__ import annotations

import resource
from dataclasses import dataclass

MAX_FILE_BYTES = 32 * 2**20
"""Largest file that a program may write."""
SCRATCH_BYTES = 64 * 2**20
"""All files of a program together, where its folder has its own file system."""
PROCESSES = 64
"""Processes of a program."""
_OPEN_FILES = 128
# Python before 3.11 uses C stack for every call, and programs of code data sets recurse deeply.
_STACK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    memory_bytes: int
    """Address space of each process; also the limit on the memory of all processes together."""
    cpu_s: int
    """Processor time of each process; the supervisor enforces the time limit of a test."""
    processes: int = PROCESSES
    """Processes of the program's user."""

    def apply(self) -> None:
        """Limit this process and its children, irrevocably unless it is privileged."""
        for kind, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_STACK, min(_STACK_BYTES, self.memory_bytes)),
            (resource.RLIMIT_AS, self.memory_bytes),
            (resource.RLIMIT_CPU, self.cpu_s),
            (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_NPROC, self.processes),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            _lower(kind, value)


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))
