"""The process of vLLM's engine core, beside the actor's, on a CPU."""

from __future__ import annotations

import multiprocessing
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def forked_core() -> Iterator[None]:
    """An AsyncLLM that is made within has a copy of this process as its engine core, where vLLM would start another Python.

    That one would import vllm once more: seven seconds and 400 MB. vLLM starts anew because Ray's processes have threads and
    OpenMP's do not survive a fork. Here OpenMP has none, see `engine_environment`, and the core calls nothing of Ray, whose
    connections are closed in it: otherwise this process would seem alive to Ray for as long as its core is.
    """
    from ray._raylet import setproctitle  # type: ignore[attr-defined]
    from vllm.v1.engine import utils

    original = utils.get_mp_context
    foreign = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_socket(fd)]

    def become_core() -> None:
        if foreign:
            # Ray has moved what vLLM's own package would write to.
            setproctitle("VLLM::EngineCore")
        for fd in foreign:
            with suppress(OSError):
                os.close(fd)

    os.register_at_fork(after_in_child=become_core)
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    try:
        yield
    finally:
        utils.get_mp_context = original
        foreign.clear()


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # the folder's own, which is closed by now
        return False
