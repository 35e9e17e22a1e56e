"""`failing_engines.py FAULT,FAULT,... FLAG ...`: the train command, in which engines fail one after the other.

A fault is `kill PLACE` or `freeze PLACE`, for the places in `PLACES`. Each strikes in a step that begins with all engines, the
first of which is hit in turn with the last; steps wait until those that were struck before have loaded their models again.
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
from tests.e2e.faulty import replace

PLACES: dict[str, tuple[str, Callable[..., bool]]] = {
    # What rank 0 is about to call when an engine fails, and whether these arguments count.
    "generate": ("mgrpo.rollout.dispatch:Dispatcher.wait", lambda *args: True),
    "pause": ("mgrpo.rollout.engines.fleet:Fleet.pause", lambda *args: True),
    "transfer": ("mgrpo.sync.channel:Sender._delivery", lambda *args: True),
    "join": ("mgrpo.sync.channel:Sender._meet", lambda sender, engine, generation: generation > 0),
    "evaluation": ("mgrpo.rollout.dispatch:Dispatcher.sample_evaluation", lambda *args: True),
}
FIRST_STEP = 5
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


class Faults:
    """Of all ranks; rank 0 has the engines."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        self.leads = os.environ.get("RANK") == "0"
        self.fleet: Any = None
        self.is_armed = False
        self.turn = 0

    def plant(self) -> None:
        replace("mgrpo.run.train.trainer:Trainer.step", self.waiting)
        if self.leads:
            for place, (function, counts) in PLACES.items():
                replace(function, lambda original, place=place, counts=counts: self.striking(original, place, counts))

    def remembering(self, original: Callable) -> Callable:
        def init(fleet: Any, *args: Any, **kwargs: Any) -> None:
            self.fleet = fleet
            original(fleet, *args, **kwargs)

        return init

    def waiting(self, original: Callable) -> Callable:
        def step(trainer: Any, number: int) -> bool:
            trainer.lead.run(lambda: self.prepare(number))
            return original(trainer, number)

        return step

    def prepare(self, step: int) -> None:
        """Rank 0, before a step."""
        if not self.faults or step < FIRST_STEP:
            return
        self.wait_for_all()
        if len(self.fleet.members.open) < len(self.fleet.engines):
            return  # The sync of this step is the one in which an engine joins.
        if self.faults[0].endswith("join"):
            # An engine that joins has died before.
            self.strike("kill", "before the join")
            while len(self.fleet.members.syncing) == len(self.fleet.engines):
                time.sleep(0.1)
            self.wait_for_all()
        self.is_armed = True

    def wait_for_all(self) -> None:
        """Until all engines have loaded their models."""
        while len(self.fleet.members.syncing) < len(self.fleet.engines):
            time.sleep(0.1)

    def striking(self, original: Callable, place: str, counts: Callable[..., bool]) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_armed and self.faults and self.faults[0].endswith(place) and counts(*args):
                self.is_armed = False
                engine = args[1] if place == "join" else args[2] if place == "transfer" else None
                self.strike(self.faults.pop(0).split()[0], place, engine)
            return original(*args, **kwargs)

        return call

    def strike(self, how: str, place: str, engine: int | None = None) -> None:
        """Hit an engine's actor, in which its core is as well."""
        self.turn += 1
        number = self.turn % len(self.fleet.engines) if engine is None else engine
        _, pid = self.fleet.engines[number].end_process.args[0].result()
        print(f"{how} {place}: engine {number}, process {pid}", flush=True)
        os.kill(pid, SIGNALS[how])


def main(faults: str, *flags: str) -> int:
    """The train command with the faults."""
    run = launch._run
    planted = Faults(faults.split(","))
    if planted.leads:
        replace("mgrpo.rollout.engines.fleet:Fleet.__init__", planted.remembering)

    def faulty_run(*args: Any) -> Any:
        from mgrpo.parallel import backend

        backend.install()  # before the first import of Megatron, as in a run without a fault
        importlib.import_module("mgrpo.run.train.trainer")
        planted.plant()
        return run(*args)

    launch._run = faulty_run
    return train_command(flags)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
