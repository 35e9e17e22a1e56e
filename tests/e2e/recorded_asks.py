"""`recorded_asks.py FILE FLAG ...`: the train command; the ids of every turn, as engines were asked and have answered, go to a file.

A line has the tokens before the turn, those sampled and their log-probabilities, from the engines' own arrays: nothing of what
trajectories are made of later is read. A trace also has the policy version of every token.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from mgrpo.cli import train_command
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.telemetry import samples
from tests.e2e.versioned_traces import versioned


def record(file: str) -> None:
    """Write every turn to `file` from here on."""
    read = Dispatcher._read

    def recorded(dispatcher: Dispatcher, requests: Sequence[Any], arrays: Any) -> Any:
        cuts = itertools.pairwise(arrays["cu_seqlens"].tolist())
        with open(file, "a") as log:
            for request, size in zip(requests, arrays["sizes"].tolist(), strict=True):
                for start, end in itertools.islice(cuts, size):
                    turn = {
                        "before": request.tokens.tolist(),
                        "sampled": arrays["tokens"][start:end].tolist(),
                        "logprobs": arrays["logprobs"][start:end].tolist(),
                    }
                    log.write(json.dumps(turn) + "\n")
        return read(dispatcher, requests, arrays)

    Dispatcher._read = recorded  # type: ignore[method-assign]
    samples.trace_records = versioned


if __name__ == "__main__":
    record(sys.argv[1])
    raise SystemExit(train_command(sys.argv[2:]))
