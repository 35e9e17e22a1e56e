"""Warm pools of ranks: a world starts once and then runs one case after another.

Where every rank can have a GPU, the ranks use NCCL; elsewhere the GPUs are hidden from them and they use gloo.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, Literal

from tests.ports import free_port

TIMEOUT_S = 120
MAX_THREADS = 100
"""Per rank; a group's thread wakes up a hundred times a second even when there is nothing to do."""


def _rank_main(rank: int, world_size: int, port: int, pipe: Any, first: Callable[[], None] | None) -> None:
    if first is not None:
        first()
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    from mgrpo.parallel import backend

    backend.install()
    backend.init_process_group(rank=rank, world_size=world_size, timeout_minutes=2)
    while True:
        job = pipe.recv()
        if job is None:
            return
        module, name, arguments = job
        try:
            value = getattr(importlib.import_module(module), name)(**arguments)
            pipe.send((True, value, len(os.listdir("/proc/self/task"))))
        except BaseException:
            pipe.send((False, traceback.format_exc(), 0))


def start_method(world_size: int, num_gpus: int) -> Literal["spawn", "forkserver"]:
    """Ranks with GPUs are spawned, as CUDA does not outlive a fork; the fork server hides GPUs from its ranks."""
    return "spawn" if world_size <= num_gpus else "forkserver"


class RankPool:
    """`world_size` processes that run a module-level function together and return what each rank returns.

    Args:
        first: called on each rank before Megatron is imported; the ranks are then spawned.
    """

    def __init__(self, world_size: int, first: Callable[[], None] | None = None) -> None:
        import torch
        import torch.multiprocessing as mp

        method = start_method(world_size, torch.cuda.device_count())
        context = mp.get_context("spawn" if first else method)
        context.set_forkserver_preload(["tests.ranks.preloaded"])
        port = free_port()
        self.pipes, self.processes = [], []
        self.is_worn = False
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, world_size, port, theirs, first), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, function: Callable, **arguments: Any) -> RankPool:
        """Start the function on all ranks; `results` waits for them."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, arguments))
        return self

    def results(self) -> list[Any]:
        """Results by rank; the first failure's traceback becomes an AssertionError and ends the pool."""
        results: list[Any] = [None] * len(self.pipes)
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            # A rank that has failed leaves the others waiting for it: it must not be asked after them.
            answered = connection.wait(waiting, TIMEOUT_S)
            if not answered:
                self.kill()
                raise AssertionError(f"no answer within {TIMEOUT_S} s from ranks {sorted(waiting.values())}")
            for pipe in answered:
                rank = waiting.pop(pipe)
                worked, results[rank], num_threads = pipe.recv()
                self.is_worn |= num_threads > MAX_THREADS
                if not worked:
                    self.kill()
                    raise AssertionError(f"rank {rank} failed:\n{results[rank]}")
        return results

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    @property
    def is_usable(self) -> bool:
        """False also with too many threads: groups that Megatron-FSDP has used are never freed."""
        return self.is_alive and not self.is_worn

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()  # until then it counts as alive, and the next test would use it
