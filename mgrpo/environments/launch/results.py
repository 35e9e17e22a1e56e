"""The reward that a command writes to a file. Untrusted."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mgrpo.environments.boxes.box import Box
from mgrpo.environments.offered.agent import checked_metrics, checked_reward

_MOST_BYTES = 1 << 16
_NOT_RUN = (126, 127)
"""Exit statuses of a shell that could not start a command."""


class ResultError(ValueError):
    """A file that is no valid result; the text is the reason."""


class Unjudged(RuntimeError):
    """A check without a verdict: it did not run to its end, or wrote an invalid result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWord:
    """A command's own reward and metrics."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


async def result_in(box: Box, path: str) -> OwnWord:
    """The result in a file of the box; an empty one without a file.

    Raises:
        ResultError: it is too long, no file, or not `{"reward": number, "metrics": {name: number}}`.
        BoxLost: the box has ended.
    """
    try:
        data = await box.get(path, max_bytes=_MOST_BYTES)
    except OSError as err:
        if err.errno == errno.ENOENT:
            return OwnWord()
        why = f"longer than {_MOST_BYTES} bytes" if err.errno == errno.EFBIG else err.strerror or str(err)
        raise ResultError(f"its result cannot be read: {why}") from err
    try:
        values = json.loads(data, parse_constant=_refuse)
        if not isinstance(values, dict):
            raise ValueError(f"it is {values!r:.80}")
        return OwnWord(
            reward=checked_reward(values.get("reward")), metrics=checked_metrics(_given(values.get("metrics")))
        )
    # Bytes that are no text are a ValueError; lists in each other are a RecursionError.
    except (ValueError, RecursionError) as err:
        raise ResultError(f'its result is not {{"reward": number, "metrics": {{name: number}}}}: {_said(err)}') from err


def reward_of_status(status: int) -> float | None:
    """The verdict of a check by its exit status: 1 for 0, else 0; None: it did not run to its end."""
    if status < 0 or status in _NOT_RUN:
        return None
    return float(status == 0)


def _given(metrics: Any) -> Any:
    return {} if metrics is None else metrics


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no finite number")


def _said(err: Exception) -> str:
    text = "it is nested too deeply" if isinstance(err, RecursionError) else str(err)
    return text.encode(errors="replace").decode()[:300]
