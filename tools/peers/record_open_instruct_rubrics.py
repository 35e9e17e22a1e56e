"""What Open Instruct's own functions make of proposed criteria and verdicts, for tests.

    PYTHONPATH=.:CHECKOUT python -m tools.peers.record_open_instruct_rubrics > tests/unit/rewards/rubrics_of_open_instruct.json

CHECKOUT is a folder with Open Instruct's sources, of which open_instruct/rubrics and logger_utils.py are imported. A group's
criteria are those of its row, those in use, and the proposed ones; its verdicts then decide which stay in use. Open Instruct's
trainer calls these functions in another order, and one of them not at all (docs/judges.md).
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
from open_instruct.rubrics.evolving_rubric_step import _cap_active_rubrics, _compute_buffer_aggregate_metrics
from open_instruct.rubrics.metrics import (
    compute_rubric_count_metrics,
    compute_rubric_reward_metrics,
    filter_rubric_buffer,
)
from open_instruct.rubrics.rubric_utils import update_ground_truths_with_evolving_rubrics

ANSWERS = 4
QUESTIONS = ("first", "second")
Rubrics = list[dict[str, Any]]


def main() -> None:
    """Print a case a line."""
    sys.stdout.write("[\n" + ",\n".join(json.dumps(recorded(random.Random(seed))) for seed in range(30)) + "\n]\n")


def recorded(draw: random.Random) -> dict[str, Any]:
    """A step of two groups: what goes in, and what comes out."""
    max_active = draw.randint(1, 4)
    before = {question: _buffer(draw, question) for question in QUESTIONS}
    proposed = [_proposals(draw, question) for question in QUESTIONS]
    buffer = json.loads(json.dumps(before))
    truths = [
        [json.dumps({"query": question, "rubrics": own["persistent_rubrics"]})]
        for question, own in before.items()
        for _ in range(ANSWERS)
    ]
    truths, valid_rate, num_persistent, num_new, num_active, buffer, skipped = (
        update_ground_truths_with_evolving_rubrics(truths, proposed, ANSWERS, buffer)
    )
    criteria = {question: own["persistent_rubrics"] + own["active_rubrics"] for question, own in buffer.items()}
    verdicts = {question: [_verdicts(draw) for _ in own] for question, own in criteria.items()}
    stats = {
        f"{question}::{criterion['title']}": {"std": float(np.std(given))}
        for question, own in criteria.items()
        for criterion, given in zip(own, verdicts[question], strict=True)
        if None not in given
    }
    filter_rubric_buffer(buffer, stats, max_active)
    _cap_active_rubrics(buffer, max_active)
    kinds = {
        question: ["persistent" if c in before[question]["persistent_rubrics"] else "evolving" for c in own]
        for question, own in criteria.items()
    }
    known = [
        [
            (given[answer], criterion["weight"], kind)
            for criterion, given, kind in zip(own, verdicts[question], kinds[question], strict=True)
            if given[answer] is not None
        ]
        for question, own in criteria.items()
        for answer in range(ANSWERS)
    ]
    metrics = {
        **compute_rubric_count_metrics(num_new, num_active),
        **compute_rubric_reward_metrics(
            [[(verdict, weight) for verdict, weight, _ in own] for own in known],
            [[kind for _, _, kind in own] for own in known],
        ),
        **_compute_buffer_aggregate_metrics(buffer),
        "evolving_rubrics/valid_rate": valid_rate,
        "evolving_rubrics/avg_gt_rubrics": num_persistent,
        "evolving_rubrics/skipped": skipped,
    }
    return {
        "max_active": max_active,
        "before": {question: {kind: _plain(own) for kind, own in kinds.items()} for question, kinds in before.items()},
        "num_new": [new and sum(map(len, new.values())) for new in proposed],
        "criteria": {question: _plain(own) for question, own in criteria.items()},
        "verdicts": verdicts,
        "after": {question: {kind: _plain(own) for kind, own in kinds.items()} for question, kinds in buffer.items()},
        "metrics": metrics,
    }


def _plain(rubrics: Rubrics) -> list[list[Any]]:
    """Description, which is the title as well, and weight."""
    return [[rubric["description"], rubric["weight"]] for rubric in rubrics]


def _buffer(draw: random.Random, question: str) -> dict[str, Rubrics]:
    return {
        "persistent_rubrics": _rubrics(draw, f"{question} row", draw.randint(1, 3)),
        "active_rubrics": _rubrics(draw, f"{question} old", draw.randint(0, 4)),
        "inactive_rubrics": _rubrics(draw, f"{question} out", draw.randint(0, 2)),
    }


def _rubrics(draw: random.Random, name: str, count: int) -> Rubrics:
    names = [f"{name}{number}" for number in range(count)]
    return [{"description": name, "weight": draw.choice([1.0, -1.0]), "title": name} for name in names]


def _proposals(draw: random.Random, question: str) -> dict[str, Rubrics] | None:
    if draw.random() < 0.2:
        return None
    return {
        kind: [dict.fromkeys(("description", "title"), f"{question} {kind[0]}{n}") for n in range(draw.randint(0, 2))]
        for kind in ("positive_rubrics", "negative_rubrics")
    }


def _verdicts(draw: random.Random) -> list[float | None]:
    """One for each answer; sometimes all the same, and sometimes none at all."""
    kind = draw.random()
    if kind < 0.15:
        return [None] * ANSWERS
    if kind < 0.4:
        return [draw.choice([0.0, 0.5, 1.0])] * ANSWERS
    return [draw.choice([0.0, 0.5, 1.0]) for _ in range(ANSWERS)]


if __name__ == "__main__":
    main()
