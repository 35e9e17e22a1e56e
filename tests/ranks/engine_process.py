"""Engines of a test in processes of their own, which can be killed. They are forks of one that has the imports behind it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]
BUCKET_BYTES = 1 << 12
"""Many rounds."""


class Forks:
    """The process whose forks are engines; they all end with this one."""

    def __init__(self, *, shares_memory: bool) -> None:
        self._door, others = socket.socketpair()
        command = [sys.executable, "-m", "tests.ranks.engine_process", str(others.fileno()), str(int(shares_memory))]
        self._process = subprocess.Popen(command, pass_fds=[others.fileno()], cwd=ROOT)
        others.close()

    def start(self) -> Connection:
        """To a new engine."""
        own, others = socket.socketpair()
        with others:
            socket.send_fds(self._door, [b"+"], [others.fileno()])
        return Connection(own.detach())

    def close(self) -> None:
        """End it."""
        self._door.close()
        self._process.wait()


class ProcessEngine(ScriptedEngine):
    """Takes over the weights that learners send, in another process."""

    def __init__(self, forks: Forks, shape: Any) -> None:
        super().__init__()
        from mgrpo.processes.background import Background

        self.thread, self.pipe = Background("engine"), forks.start()
        self.lasts: int | None = None
        """Messages that arrive before it is killed."""
        self.ready = self._ask("start", shape)

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        return self._ask("join", dict(invitation))

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        def receive() -> None:
            if self._call("receive", version, check, self.lasts):
                self.version = version

        return self.thread.submit(receive)

    def total(self) -> float:
        """Of what it holds."""
        return self._ask("total").result()

    def close(self) -> None:
        self.thread.submit(self.pipe.close)

    def _ask(self, *call: Any) -> Future[Any]:
        return self.thread.submit(partial(self._call, *call))

    def _call(self, *call: Any) -> Any:
        self.pipe.send(call)
        is_done, answer = self.pipe.recv()
        if not is_done:
            raise RuntimeError(answer)
        return answer


class Served:
    """What such a process does."""

    def start(self, shape: Any) -> None:
        import torch

        from mgrpo.layout import InferLayout
        from mgrpo.models.table import engine_boxes

        (boxes,) = engine_boxes(shape, InferLayout())
        self.live = [(box, torch.zeros(box.shape)) for box in boxes]
        self.receiver: Any = None

    def join(self, invitation: dict[str, Any]) -> None:
        from mgrpo.sync.vllm_plugin.receiver import Receiver, joined

        make = partial(Receiver, self.live, worker=0, invitation=invitation)
        self.receiver = joined(self.receiver, invitation, make)

    def receive(self, version: int, check: bool, lasts: int | None) -> bool:
        """Whether weights have come; the process is killed once more than `lasts` messages have."""
        receive = self.receiver._receive

        def counted(version: int, arrived: Any) -> None:
            def tell(count: int) -> None:
                type(arrived).tell(arrived, count)
                if lasts is not None and count > lasts:
                    os.kill(os.getpid(), signal.SIGKILL)

            arrived.tell = tell
            receive(version, arrived)

        self.receiver._receive = counted
        try:
            has_come = self.receiver.receive(version)
        finally:
            self.receiver._receive = receive
        if has_come and check:
            self.receiver.report_digests(version)
        return has_come

    def total(self) -> float:
        return sum(float(view.double().sum()) for _, view in self.live)


def serve(pipe: Connection) -> None:
    """Answer calls until the other end has gone."""
    served = Served()
    while True:
        name, *arguments = pipe.recv()
        try:
            pipe.send((True, getattr(served, name)(*arguments)))
        except Exception as err:
            pipe.send((False, f"{type(err).__name__}: {err}"))


def main() -> None:
    """Fork an engine for each descriptor that comes."""
    from mgrpo.processes.lifetime import die_with_parent
    from mgrpo.sync import channel, shared
    from mgrpo.sync.vllm_plugin import receiver

    die_with_parent()
    for module in (channel, receiver, shared):
        module.BUCKET_BYTES = BUCKET_BYTES
    if sys.argv[2] == "0":
        shared.connect = lambda *args, **kwargs: None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    door = socket.socket(fileno=int(sys.argv[1]))
    while True:
        told, descriptors, _, _ = socket.recv_fds(door, 1, 1)
        if not told:
            return
        if os.fork() == 0:
            die_with_parent()
            door.close()
            try:
                serve(Connection(descriptors[0]))
            except (EOFError, BrokenPipeError):
                os._exit(0)
            finally:
                os._exit(1)
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
