"""A process that rehearses for the tests, and says which lines of the watched files it has run.

python -m tests.unit.rehearsal.server [--stands-in] FILE ... reads and answers the requests of `mgrpo.rehearsal`, and in addition
`{"lines": true}` for the lines run so far, and requests with a `mutation` of this module's MUTATIONS.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit.rehearsal.lines import Lines

MEMORY = 80 << 30


@contextmanager
def rows_on_the_host() -> Iterator[None]:
    """The index of the rows that are scored stays where numpy made it."""
    from mgrpo.policy import microbatch

    rows = microbatch._response_rows

    def left(*args: Any) -> Any:
        made = rows(*args)
        return dataclasses.replace(made, rows=made.rows.cpu())

    microbatch._response_rows = left
    try:
        yield
    finally:
        microbatch._response_rows = rows


@contextmanager
def an_item_in_the_loss() -> Iterator[None]:
    """The loss asks the device for a number."""
    from mgrpo import algo

    loss = algo.policy_loss

    def asking(logprobs: Any, *args: Any, **kwargs: Any) -> Any:
        float(logprobs.sum())
        return loss(logprobs, *args, **kwargs)

    algo.policy_loss = asking
    try:
        yield
    finally:
        algo.policy_loss = loss


@contextmanager
def restored_on_the_host() -> Iterator[None]:
    """A moment is where the file was read."""
    from mgrpo.checkpoint.train_state import TrainState

    restore = TrainState.restore_optimizer

    def leaving(self: Any, *args: Any, **kwargs: Any) -> None:
        restore(self, *args, **kwargs)
        for shard in self.policy.shards:
            state = shard.optimizer.state[shard.parameter]
            state["exp_avg"] = state["exp_avg"].cpu()

    TrainState.restore_optimizer = leaving
    try:
        yield
    finally:
        TrainState.restore_optimizer = restore


@contextmanager
def restored_through_a_copy() -> Iterator[None]:
    """What was read is copied to the device before it is copied to its place."""
    from mgrpo.checkpoint.reader import StoredCheckpoint

    read = StoredCheckpoint.read

    def copying(self: Any, kind: str, box: Any, out: Any = None) -> Any:
        values = read(self, kind, box)
        return values if out is None else out.copy_(values.to(out.device))

    StoredCheckpoint.read = copying
    try:
        yield
    finally:
        StoredCheckpoint.read = read


MUTATIONS = {
    mutate.__name__: mutate
    for mutate in (rows_on_the_host, an_item_in_the_loss, restored_on_the_host, restored_through_a_copy)
}


def answer(request: dict[str, Any], lines: Lines) -> Any:
    from mgrpo.rehearsal import __main__ as program

    if "lines" in request:
        return {file: sorted(run) for file, run in lines.run.items()}
    if mutation := request.pop("mutation", None):
        with MUTATIONS[mutation]():
            return program.answer(request)
    return program.answer(request)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    stands_in, files = "--stands-in" in sys.argv[1:], [word for word in sys.argv[1:] if not word.startswith("--")]
    lines = Lines(files)
    from mgrpo.rehearsal import __main__ as program
    from mgrpo.rehearsal import device_bytes

    program.prepare(MEMORY, stands_in=stands_in)
    from mgrpo.rehearsal import rehearsed_step  # noqa: F401

    gc.collect()
    gc.freeze()  # a rehearsal collects what it leaves, and would look through all modules
    device_bytes.ROUNDING = 1  # sizes are compared to the byte
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), lines)), file=answers, flush=True)


if __name__ == "__main__":
    main()
