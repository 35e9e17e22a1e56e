"""The rubric in a row's label, and the score that the verdicts on its criteria add up to."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from mgrpo.rewards.verifier import shown, single
from mgrpo.types import Criterion

RUBRIC = "rubric"
"""The verifier whose labels are rubrics."""


def place_of_rubric(verifiers: Sequence[str]) -> int:
    """Index of the first rubric among a row's verifiers; -1 without one. Only the first one evolves."""
    return next((place for place, name in enumerate(verifiers) if name.lower() == RUBRIC), -1)


def rubric_of(ground_truth: object) -> dict:
    """The label {"query": ..., "rubrics": [{"description": ..., "weight": ...}, ...]}, given as an object or as its JSON text."""
    label = single(ground_truth)
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError) as err:
            raise ValueError(f"ground_truth={shown(label)} is not the JSON text of a rubric ({err})") from None
    if not isinstance(label, dict):
        raise ValueError(f"ground_truth={shown(label)} is not a rubric; expected an object with query and rubrics")
    return label


def question_of(label: dict, prompt: str) -> str:
    """The question that the answers are judged by: the label's own, else the prompt."""
    return str(label.get("query") or label.get("Question") or prompt)


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


def weighted_mean(criteria: Sequence[Criterion], verdicts: Sequence[float]) -> float:
    """Sum of w v over the sum of |w|, with a verdict v in 0 .. 1 by each criterion of weight w; NaN where one is missing."""
    weighted = math.fsum(criterion.weight * verdict for criterion, verdict in zip(criteria, verdicts, strict=True))
    return weighted / math.fsum(abs(criterion.weight) for criterion in criteria)
