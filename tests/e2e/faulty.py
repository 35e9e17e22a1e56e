"""`faulty.py FAULT STEP FLAG ...`: the train command, in which one fault is planted in one training step.

What can be planted: `kill PLACE`, a rank kills itself there as `kill -9` would; `stop PLACE`, torchrun gets SIGTERM;
`stop twice PLACE`, it gets two, and the rank stays where it is; `nan`, gradients are NaN from this step on, `nan once`, in this step; `none`.
fsspec also knows `shared://PATH` here, a remote storage that is a folder of this machine.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from mgrpo.cli import train_command
from mgrpo.run.start import launch

PLACES: dict[str, tuple[int, str, int, Callable[..., bool]]] = {
    # Rank, what it is about to call, for the how manieth time since the step began, and whether these arguments count.
    "generate": (0, "mgrpo.rollout.dispatch:Dispatcher.wait", 1, lambda *args: True),
    "second turn": (0, "mgrpo.rollout.dispatch:Dispatcher.send_turns", 2, lambda *args: True),
    "score": (0, "mgrpo.run.produce.group_scoring:Scoring._keep", 1, lambda *args: True),
    "forward": (1, "mgrpo.algo:policy_loss", 1, lambda *args: True),
    "optimizer": (1, "mgrpo.policy.optimizer:clip_grad_by_total_norm_fp32", 2, lambda *args: True),
    "sync": (1, "mgrpo.sync.channel:Sender.send", 1, lambda *args: True),
    "after the line": (0, "mgrpo.telemetry.progress:Progress.update", 1, lambda *args: True),
    "evaluation": (0, "mgrpo.run.produce.evaluator:Evaluator.evaluate", 1, lambda *args: True),
    "after the evaluation": (0, "mgrpo.telemetry.progress:Progress.evaluation", 1, lambda *args: True),
    "save, half a file": (1, "mgrpo.checkpoint.shard:Hashed.write", 50, lambda *args: True),
    "save, no manifest": (0, "os:replace", 1, lambda *args: str(args[1]).endswith("manifest.json")),
    "rotation": (0, "mgrpo.checkpoint.folder:LocalFolder.remove_all", 1, lambda *args: True),
    "export": (0, "mgrpo.model_io.hf_folder:write_tensors", 1, lambda *args: True),
}


class Fault:
    """Counts steps and calls, and strikes once."""

    def __init__(self, name: str, step: int) -> None:
        self.name, self.step = name, step
        self.now = 0
        """The training step that has begun last."""
        self.calls = 0

    def plant(self) -> None:
        """Put it in its place; call when everything can be imported."""
        if self.name == "none":
            return
        replace("mgrpo.run.train.trainer:Trainer.step", self.counted)
        if self.name in ("nan", "nan once"):
            replace("mgrpo.policy.optimizer:PolicyOptimizer.update", self.with_nan)
            return
        place = max((place for place in PLACES if self.name.endswith(f" {place}")), key=len)
        rank, function, number, counts = PLACES[place]
        if os.environ["RANK"] == str(rank):
            replace(function, lambda original: self.planted(original, number, counts))

    def counted(self, original: Callable) -> Callable:
        def step(trainer: Any, number: int) -> bool:
            self.now, self.calls = number, 0
            return original(trainer, number)

        return step

    def planted(self, original: Callable, number: int, counts: Callable[..., bool]) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.now == self.step and counts(*args):
                self.calls += 1
                if self.calls == number:
                    self.strike()
            return original(*args, **kwargs)

        return call

    def with_nan(self, original: Callable) -> Callable:
        def update(optimizer: Any) -> float:
            if self.now == self.step or (self.now > self.step and self.name == "nan"):
                optimizer.chunks[0].buffers[0].grad_data[0] = float("nan")
            return original(optimizer)

        return update

    def strike(self) -> None:
        if self.name.startswith("kill "):
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(12)  # longer than Ray would live without its control store, had that got the signal, too
        if self.name.startswith("stop twice "):
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(300)


def replace(place: str, change: Callable[[Callable], Callable]) -> None:
    """Replace `module:name` or `module:class.name` by what `change` makes of it."""
    module, path = place.split(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, change(getattr(owner, name)))


def register_shared_storage() -> None:
    """`shared://PATH` for fsspec."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class SharedStorage(LocalFileSystem):
        protocol = "shared"

        def __init__(self, **options: Any) -> None:
            super().__init__(auto_mkdir=True, **options)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(str(path).removeprefix("shared://"))

    fsspec.register_implementation("shared", SharedStorage)


def main(fault: str, step: str, *flags: str) -> int:
    """The train command with the fault."""
    register_shared_storage()
    run = launch._run

    def faulty_run(*args: Any) -> Any:
        from mgrpo.parallel import backend

        backend.install()  # before the first import of Megatron, as in a run without a fault
        importlib.import_module("mgrpo.run.train.trainer")
        Fault(fault, int(step)).plant()
        return run(*args)

    launch._run = faulty_run
    return train_command(flags)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
