"""Counts and token lengths of a mix: for each entry and in total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mgrpo.data.amounts import Entry


def statistics_of(
    entries: Sequence[Entry],
    num_rows: Sequence[int],
    lengths: Sequence[np.ndarray],
    *,
    max_tokens: int,
    overlong: str,
) -> dict[str, Any]:
    """Counts and token lengths, in JSON.

    Args:
        num_rows: rows of each entry's source.
        lengths: for each entry `[taken]`, tokens of the prompts before any were left out or cut.
    """
    each = [
        {"source": entry.source, "split": entry.split, "amount": entry.amount, "rows": rows}
        | _counts(own, max_tokens=max_tokens, overlong=overlong)
        for entry, rows, own in zip(entries, num_rows, lengths, strict=True)
    ]
    total = _counts(np.concatenate(list(lengths)), max_tokens=max_tokens, overlong=overlong)
    return {
        "max_prompt_token_length": max_tokens,
        "overlong_prompt_policy": overlong,
        "total": {"rows": int(sum(num_rows))} | total,
        "sources": each,
    }


def statistics_lines(statistics: Mapping[str, Any]) -> list[str]:
    """The statistics as text: a line per source, and one for all of them if there are several."""
    parts = list(statistics["sources"])
    if len(parts) > 1:
        parts.append({"source": "all", **statistics["total"]})
    fate = "cut" if statistics["overlong_prompt_policy"] == "truncate_left" else "left out"
    lines = []
    for part in parts:
        line = f"{part['source']}: {part['rows']} rows, {part['taken']} taken, {part['prompts']} prompts"
        if part["too_long"]:
            line += f", {part['too_long']} of more than {statistics['max_prompt_token_length']} tokens {fate}"
        if tokens := part["tokens"]:
            line += f"; tokens {tokens['min']} to {tokens['max']}, half {tokens['p50']} or fewer"
        lines.append(line)
    return lines


def _counts(lengths: np.ndarray, *, max_tokens: int, overlong: str) -> dict[str, Any]:
    too_long = int((lengths > max_tokens).sum())
    counts: dict[str, Any] = {
        "taken": len(lengths),
        "too_long": too_long,
        "prompts": len(lengths) if overlong == "truncate_left" else len(lengths) - too_long,
        "tokens": None,
    }
    if len(lengths):
        quantiles = np.quantile(lengths, [0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0], method="inverted_cdf")
        names = ("min", "p25", "p50", "p75", "p90", "p99", "max")
        counts["tokens"] = {"mean": float(lengths.mean()), **dict(zip(names, map(int, quantiles), strict=True))}
    return counts
