"""Random batches for other trainers' losses, and the files in which tests find what these gave.

A batch is ragged, so far off its old policy that clips and bounds are met, and has tokens without training. A trainer takes it
in rows, padded at the end; a file holds the tokens of one sequence after the other.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTHS = ((3, 1, 7, 2, 5, 4), (8, 2, 6))
LONGEST = 8
LOGPROBS = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows `[sequences, LONGEST]` float64, with zeros behind their ends; `advantages` `[sequences]`, `mask` bool."""

    lengths: Sequence[int]
    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor

    def tokens(self, rows: Tensor) -> Tensor:
        """Tokens of rows, one sequence after the other."""
        return torch.cat([row[:length] for row, length in zip(rows, self.lengths, strict=True)])


def batches(*, has_idle_row: bool = False) -> list[Batch]:
    """One batch with every second sequence partly trained, and one that is trained whole.

    Args:
        has_idle_row: whether a sequence of the first one has no trained token.
    """
    return [_batch(number, lengths, has_idle_row=has_idle_row) for number, lengths in enumerate(LENGTHS)]


def _batch(number: int, lengths: Sequence[int], *, has_idle_row: bool) -> Batch:
    generator = torch.Generator().manual_seed(number)
    shape = len(lengths), LONGEST
    inside = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]

    def rows(mean: Tensor | float, scale: float) -> Tensor:
        # Few digits, so that a text holds them exactly.
        noise = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.where(inside, mean + noise, 0.0).round(decimals=4)

    logprobs = rows(-2.0, 0.5)
    old = rows(logprobs, 0.6)
    mask = inside.clone()
    if number == 0:
        mask[::2, 1::3] = False
        mask[1] = inside[1] & (not has_idle_row)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64).round(decimals=4)
    return Batch(
        lengths=lengths,
        logprobs=logprobs,
        old_logprobs=old,
        ref_logprobs=rows(logprobs, 0.5),
        rollout_logprobs=rows(old, 0.5),
        advantages=advantages,
        mask=mask,
    )


def record(
    source: str,
    given: Iterable[Any],
    loss_of: Callable[[Any, Batch, Tensor], Tensor],
    *,
    has_idle_row: bool = False,
) -> None:
    """Print the file of a trainer's losses and their gradients in the log-probabilities: JSON with a line a batch and a case.

    Args:
        source: the trainer and its release.
        given: the trainer's own words or values of each case.
        loss_of: of one of them, a batch and its log-probabilities.
    """
    every_batch, cases = batches(has_idle_row=has_idle_row), []
    for number, words in enumerate(given):
        at = number // 2 % len(every_batch)
        logprobs = every_batch[at].logprobs.clone().requires_grad_()
        loss = loss_of(words, every_batch[at], logprobs)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        tokens = every_batch[at].tokens(gradient)
        cases.append({"given": words, "batch": at, "loss": _short(loss), "gradient": _short(tokens)})
    parts = f'{{"source": {json.dumps(source)},', '"batches": [', _joined(map(_record, every_batch)), "],"
    print("\n".join([*parts, '"cases": [', _joined(cases), "]}"]))


def version_of(checkout: Path) -> str:
    """The commit of a clone and its day."""
    git = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def _record(batch: Batch) -> dict[str, Any]:
    rows: dict[str, Any] = {name: batch.tokens(getattr(batch, name)).tolist() for name in LOGPROBS}
    mask = batch.tokens(batch.mask).int().tolist()
    return {"lengths": list(batch.lengths), **rows, "advantages": batch.advantages.tolist(), "mask": mask}


def _short(values: Tensor) -> Any:
    listed = values.detach().tolist()
    return float(f"{listed:.8g}") if isinstance(listed, float) else [float(f"{value:.8g}") for value in listed]


def _joined(records: Iterable[Mapping[str, Any]]) -> str:
    return ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
