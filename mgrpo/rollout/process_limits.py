"""Checks of this user's process limits: without threads, open files and address space, learners, Ray and engines fail without a reason."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

OPEN_FILES = 256
"""Descriptors that a process of the smallest run opens, with a margin."""
ENOUGH_FILES = 65536
"""Descriptors that suffice for large runs."""
LEARNER_THREADS = 32
"""Threads that a learner on two cores starts after its own start."""
RAY_THREADS = 224
"""Threads of Ray's daemons and a starting engine, on two cores; 250 in all are too few."""
ADDRESS_BYTES = 4 << 30
"""Address space of a learner of the smallest run, with a margin."""
FILE_BYTES = 512 << 20
"""Size of the largest file of a small run: Ray's shared memory, with a margin."""
_PROBE_STACK_BYTES = 256 << 10
"""Stack of a probe thread, large enough for the C library of any processor."""


def raise_open_files() -> None:
    """Raise the limit of open files of this process and its children as far as allowed, up to `ENOUGH_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit_problems(*, num_learners: int, starts_ray: bool) -> Iterator[str]:
    """Problems of limits that are too low for a run of `num_learners` on this machine."""
    for kind, flag, what, needed, unit, enough in (
        (resource.RLIMIT_NOFILE, "-n", "open files of a process", OPEN_FILES, 1, str(ENOUGH_FILES)),
        (resource.RLIMIT_AS, "-v", "kB of address space", ADDRESS_BYTES, 1024, "unlimited"),
        (resource.RLIMIT_FSIZE, "-f", "kB in a file", FILE_BYTES, 1024, "unlimited"),
    ):
        # `raise_open_files` raises the soft limit of open files to the hard one.
        found = resource.getrlimit(kind)[kind == resource.RLIMIT_NOFILE]
        if found != resource.RLIM_INFINITY and found < needed:
            yield (
                f"`ulimit {flag}` is {found // unit} {what}, and a run needs {needed // unit} at least; raise it with "
                f"`ulimit {flag} {enough}`, or have root raise its hard limit"
            )
    threads = LEARNER_THREADS * num_learners + RAY_THREADS * starts_ray
    if (found := _startable(threads)) < threads:
        yield (
            f"only {found} more threads can be started, and a run needs about {threads}, more on many cores; raise the limit of this "
            "user's processes and threads (ulimit -u), and in a container or job that of its control group (pids.max; docker: "
            "--pids-limit -1; systemd: TasksMax=infinity)"
        )


def _startable(number: int) -> int:
    """Number of threads, up to `number`, that this process can start now under ulimit, control groups and other processes."""
    ended = threading.Event()
    started: list[threading.Thread] = []
    before = threading.stack_size(_PROBE_STACK_BYTES)
    try:
        for _ in range(number):
            thread = threading.Thread(target=ended.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        pass  # "can't start new thread"
    finally:
        threading.stack_size(before)
        ended.set()
        for thread in started:
            thread.join()
    return len(started)
