"""`versioned_traces.py FLAG ...`: the train command; a trace also has the policy version of every token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from mgrpo.cli import train_command
from mgrpo.telemetry import samples

trace_records = samples.trace_records


def versioned(step: int, groups: Any, dropped: Any, advantages: Any, pieces: Any) -> Iterator[samples.Record]:
    """`trace_records`, one entry more."""
    completions = [completion for scored in (*groups, *dropped) for completion in scored.group.completions]
    records = trace_records(step, groups, dropped, advantages, pieces)
    for record, completion in zip(records, completions, strict=True):
        yield record | {"policy_versions": completion.policy_versions.tolist()}


if __name__ == "__main__":
    samples.trace_records = versioned
    raise SystemExit(train_command(sys.argv[1:]))
