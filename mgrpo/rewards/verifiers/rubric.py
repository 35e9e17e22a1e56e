"""Rubrics, whose weighted criteria are judged one by one: `rubric`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import ClassVar

from mgrpo.config.schema import Reward
from mgrpo.rewards.judges import judgements
from mgrpo.rewards.judges.asking import AskingVerifier
from mgrpo.rewards.judges.endpoint import rubric_endpoint
from mgrpo.rewards.rubrics.criteria import question_of, read_criteria, rubric_of, weighted_mean
from mgrpo.rewards.verifier import Answer

_TEMPERATURE = 0.0


class Rubric(AskingVerifier):
    """The weighted mean of the criteria's verdicts v in 0 .. 1: sum of w v over sum of |w|, where faults weigh below 0.

    The label is {"query": ..., "rubrics": [{"description": ..., "weight": ...}, ...]}, as an object or as its JSON text;
    without a query the row's prompt is the question. One criterion without a verdict leaves the answer without a score.
    """

    name: ClassVar[str] = "rubric"

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        read_criteria(rubric_of(ground_truth))
        return ""

    def __init__(self, settings: Reward) -> None:
        super().__init__(settings, rubric_endpoint(settings), temperature=_TEMPERATURE)

    async def score(self, answer: Answer) -> float:
        label = rubric_of(answer.ground_truth)
        criteria, question = read_criteria(label), question_of(label, answer.prompt)
        verdicts = await _all_or_none(
            self.judge(judgements.RUBRIC, question, answer.completion, criterion.description) for criterion in criteria
        )
        return weighted_mean(criteria, verdicts)


async def _all_or_none(verdicts: Iterable[Coroutine[None, None, float]]) -> list[float]:
    """All results, requested at once; the first failure ends the others."""
    tasks = [asyncio.ensure_future(verdict) for verdict in verdicts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
