"""`killed_turn.py FILE FLAG ...`: `recorded_asks.py`, and the engine is killed while it samples turns of agents, once.

It is killed in the dispatcher's thread, right after it was given some: of the last no answer can have come.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from mgrpo.cli import train_command
from mgrpo.rollout.dispatch import Dispatcher
from tests.e2e import recorded_asks

TURNS = 40
"""How many of the training it has been given by then."""

if __name__ == "__main__":
    num_given = 0
    give, dispatch = Dispatcher._given, Dispatcher._dispatch

    def given(dispatcher: Any, request: Any, engine: int) -> None:
        global num_given
        num_given += request.is_training
        give(dispatcher, request, engine)

    def dispatched(dispatcher: Any) -> None:
        before = num_given
        dispatch(dispatcher)
        if before < TURNS <= num_given:
            _, pid = dispatcher.fleet.engines[0].end_process.args[0].result()
            os.kill(pid, signal.SIGKILL)

    Dispatcher._given, Dispatcher._dispatch = given, dispatched  # type: ignore[method-assign]
    recorded_asks.record(sys.argv[1])
    raise SystemExit(train_command(sys.argv[2:]))
