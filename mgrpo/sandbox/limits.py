"""What one process of a program may use. The supervisor watches what they use together."""

from __future__ import annotations

import resource
from dataclasses import dataclass

FILE_BYTES = 32 * 2**20
"""Largest file that a program may write."""
SCRATCH_BYTES = 64 * 2**20
"""All files of a program together, where its folder is a file system of its own."""
_PROCESSES = 64
_OPEN_FILES = 128
# Python before 3.11 takes C stack for every call, and programs for tests recurse deep.
_STACK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    memory_bytes: int
    """Address space of each process; also what all of them may hold together."""
    cpu_s: int
    """Processor time of each process; the time limit of a test is the supervisor's business."""

    def apply(self) -> None:
        """Bind this process and its children, for good unless it is privileged."""
        for kind, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_STACK, min(_STACK_BYTES, self.memory_bytes)),
            (resource.RLIMIT_AS, self.memory_bytes),
            (resource.RLIMIT_CPU, self.cpu_s),
            (resource.RLIMIT_FSIZE, FILE_BYTES),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_NPROC, _PROCESSES),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            _lower(kind, value)


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))
