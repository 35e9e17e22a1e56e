"""`recorded_turns.py FILE FLAG ...`: the train command; every rank and engine call adds a line when device memory changes hands.

`begin WHAT` and `end WHAT` of engine calls are the caller's view, so what an engine did lies between them.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from mgrpo.cli import train_command
from mgrpo.rollout.vllm.ray_engine import RayEngine
from mgrpo.run.start import launch


def record(file: str) -> None:
    """Write one line a call to `file`; appended lines of several processes do not mix."""
    from mgrpo.policy.policy import Policy

    def say(words: str) -> None:
        with open(file, "a") as log:
            log.write(f"{words}\n")

    call = RayEngine._call

    def called(engine: RayEngine, method: str, *args: object) -> Any:
        say(f"begin {method}")
        recorded: Future[Any] = Future()

        def finished(answer: Future[Any]) -> None:
            # Before whoever waits for the answer goes on.
            say(f"end {method}")
            if error := answer.exception():
                recorded.set_exception(error)
            else:
                recorded.set_result(answer.result())

        call(engine, method, *args).add_done_callback(finished)
        return recorded

    offload, restore = Policy.offload, Policy.restore

    def offloaded(policy: Policy, *, keep_boxes: bool = False) -> int:
        given_up = offload(policy, keep_boxes=keep_boxes)
        say(f"rank {os.environ['RANK']} {'keeps what is synced' if keep_boxes else 'keeps nothing'}")
        return given_up

    def restored(policy: Policy) -> None:
        say(f"rank {os.environ['RANK']} keeps all")
        restore(policy)

    RayEngine._call, Policy.offload, Policy.restore = called, offloaded, restored  # type: ignore[method-assign]


if __name__ == "__main__":
    file = sys.argv[1]
    meet = launch._meet

    def recorded_meeting(*args: Any) -> str:
        # Megatron may be imported from here on.
        record(file)
        return meet(*args)

    launch._meet = recorded_meeting
    raise SystemExit(train_command(sys.argv[2:]))
