"""Records in the files of a run, read as untrusted input: lines that are not JSON or not such records are skipped and counted.

Files may be damaged by disks, crashes, editors, and others with access to the folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Unread = Counter[str]
"""Number of skipped lines, by the name of the file."""
Shape = Callable[[object], bool]

MAX_DIGITS = 15
"""Most digits of an integer; longer ones are read as floats."""
MAX_SIZE = 1e100
"""Bound of numbers; larger ones are read as null: their sums and squares would be infinite."""
MAX_NAME = 300
"""Most characters of a metric's name."""


def read_records(paths: Iterable[Path], shape: Shape | None = None, unread: Unread | None = None) -> Iterator[Record]:
    """The objects in JSONL files that have the shape; an incomplete last line, which may still be written, is not counted as unread."""
    for path in paths:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    yield record_of(line, shape)
                except ValueError:
                    if unread is not None and line.endswith("\n"):
                        unread[path.name] += 1


def record_of(line: str | bytes, shape: Shape | None = None) -> Record:
    """The object in a line, with numbers bounded so that sums are finite.

    Raises:
        ValueError: the line is not a JSON object, or has another shape.
    """
    try:
        found = json.loads(line, parse_int=_whole, parse_float=_number, parse_constant=lambda name: None)
    except RecursionError as err:
        raise ValueError("nested too deep") from err
    if not isinstance(found, dict) or not (shape is None or shape(found)):
        raise ValueError("not such a record")
    return found


def is_metrics(record: object) -> bool:
    """True for a record of metrics.jsonl: numbers, or lists of them, by name, and a step."""
    return (
        isinstance(record, dict)
        and _is_whole(record.get("step"))
        and all(
            len(name) <= MAX_NAME and (_is_number(value) or _all(_is_number, value)) for name, value in record.items()
        )
    )


def is_engine_states(record: object) -> bool:
    """True for a record of engines.jsonl: the states of all engines, or of those that changed, and a step."""
    if not isinstance(record, dict) or not _is_whole(record.get("step")):
        return False
    return _all(_is_engine, record["engines"] if "engines" in record else record.get("changed"))


def is_sample(record: object) -> bool:
    """True for a completion in the files of rollouts; checks the fields that readers use."""
    return isinstance(record, dict) and _has(record, _SAMPLE)


def _whole(digits: str) -> int | float | None:
    return int(digits) if len(digits) <= MAX_DIGITS else _number(digits)


def _number(digits: str) -> float | None:
    value = float(digits)
    return value if abs(value) < MAX_SIZE else None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _all(shape: Shape, value: object) -> bool:
    return isinstance(value, list) and all(map(shape, value))


def _has(record: Record, shapes: dict[str, Shape]) -> bool:
    """True if all present fields have these shapes."""
    return all(shapes[name](value) for name, value in record.items() if name in shapes)


def _is_engine(value: object) -> bool:
    if not isinstance(value, dict) or not (_is_whole(value.get("engine")) and _is_whole(value.get("starts"))):
        return False
    return isinstance(value.get("state"), str) and _is_text(value.get("last_failure"))


def _is_trajectory(value: object) -> bool:
    return value is None or (isinstance(value, dict) and _has(value, _TRAJECTORY))


def _is_branch(value: object) -> bool:
    return isinstance(value, dict) and _has(value, _BRANCH)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and _is_text(value.get("role"))


def _is_agent(value: object) -> bool:
    return value is None or (isinstance(value, dict) and _has(value, _AGENT))


def _are_turns(value: object) -> bool:
    return value is None or _all(lambda turn: isinstance(turn, dict) and _all(_is_call, turn.get("calls")), value)


def _is_call(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and _is_flag(value.get("failed"))


_AGENT: dict[str, Shape] = {
    "ended": _is_text,
    "output": _is_text,
    "status": _is_number,
    "seconds": _is_number,
    "counts": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
}
_BRANCH: dict[str, Shape] = {
    **dict.fromkeys(("parent", "after"), lambda value: value is None or _is_whole(value)),
    **dict.fromkeys(("num_turns", "context_tokens"), _is_whole),
    "rewritten": _is_flag,
    "messages": lambda value: _all(_is_message, value),
}
_TRAJECTORY: dict[str, Shape] = {
    "ended_by": _is_text,
    "turns": _are_turns,
    "branches": lambda value: _all(_is_branch, value),
    "agent": _is_agent,
}
_SAMPLE: dict[str, Shape] = {
    "step": lambda value: value is None or _is_whole(value),
    **dict.fromkeys(("prompt_idx", "prompt_id", "sample_idx"), _is_scalar),
    **dict.fromkeys(("prompt", "completion", "finish_reason", "ended_by"), _is_text),
    **dict.fromkeys(("reward", "advantage", "num_tokens", "policy_version"), _is_number),
    "correct": _is_flag,
    "scores": lambda value: value is None or (isinstance(value, dict) and all(map(_is_number, value.values()))),
    "columns": lambda value: value is None or isinstance(value, dict),
    "tokens": lambda value: value is None or _all(_is_text, value),
    "logprobs": lambda value: value is None or _all(_is_number, value),
    "trajectory": _is_trajectory,
}
