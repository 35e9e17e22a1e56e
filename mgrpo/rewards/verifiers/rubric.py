"""Rubrics, whose weighted criteria are judged one by one: `rubric`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Iterable
from typing import ClassVar, NamedTuple

from mgrpo.config.schema import Reward
from mgrpo.rewards.judges import judgements
from mgrpo.rewards.judges.asking import AskingVerifier
from mgrpo.rewards.judges.endpoint import rubric_endpoint
from mgrpo.rewards.verifier import Answer, shown, single

_TEMPERATURE = 0.0


class Criterion(NamedTuple):
    description: str
    weight: float


class Rubric(AskingVerifier):
    """The weighted mean of the criteria's verdicts v in 0 .. 1: sum of w v over sum of |w|, where faults weigh below 0.

    The label is {"query": ..., "rubrics": [{"description": ..., "weight": ...}, ...]}, as an object or as its JSON text;
    without a query the row's prompt is the question. One criterion without a verdict leaves the answer without a score.
    """

    name: ClassVar[str] = "rubric"

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        read_criteria(_label(ground_truth))
        return ""

    def __init__(self, settings: Reward) -> None:
        super().__init__(settings, rubric_endpoint(settings), temperature=_TEMPERATURE)

    async def score(self, answer: Answer) -> float:
        label = _label(answer.ground_truth)
        criteria = read_criteria(label)
        question = label.get("query") or label.get("Question") or answer.prompt
        verdicts = await _all_or_none(
            self.judge(judgements.RUBRIC, str(question), answer.completion, criterion.description)
            for criterion in criteria
        )
        weighted = math.fsum(criterion.weight * verdict for criterion, verdict in zip(criteria, verdicts, strict=True))
        return weighted / math.fsum(abs(criterion.weight) for criterion in criteria)


def read_criteria(label: dict) -> list[Criterion]:
    """The criteria of a label; those without a description, or of weight 0, are left out. A missing weight is 1."""
    rows = label.get("rubrics")
    if not isinstance(rows, list) or not rows:
        raise ValueError(
            f"ground_truth has rubrics={shown(rows)}; expected a list of criteria with description and weight"
        )
    criteria = []
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(
                f"ground_truth has a criterion {shown(row)}; expected an object with description and weight"
            )
        described = row.get("description") or row.get("rubric_item") or row.get("Ingredient") or ""
        weight = row.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f"ground_truth has a criterion of weight {shown(weight)}; expected a number")
        if isinstance(described, str) and described.strip() and weight != 0:
            criteria.append(Criterion(described, float(weight)))
    if not criteria:
        raise ValueError(f"ground_truth has no criterion with a description and a weight other than 0: {shown(rows)}")
    return criteria


def _label(ground_truth: object) -> dict:
    label = single(ground_truth)
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError) as err:
            raise ValueError(f"ground_truth={shown(label)} is not the JSON text of a rubric ({err})") from None
    if not isinstance(label, dict):
        raise ValueError(f"ground_truth={shown(label)} is not a rubric; expected an object with query and rubrics")
    return label


async def _all_or_none(verdicts: Iterable[Coroutine[None, None, float]]) -> list[float]:
    """All results, asked for at once; the first failure ends the others."""
    tasks = [asyncio.ensure_future(verdict) for verdict in verdicts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
