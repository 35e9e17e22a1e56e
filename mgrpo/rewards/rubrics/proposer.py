"""The model that reads a group's answers and proposes criteria."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import ClassVar

from mgrpo.config.schema import Reward
from mgrpo.rewards.judges.asking import Asker, encodable, final_answer
from mgrpo.rewards.judges.endpoint import FEWEST_TOKENS, SPARE_TOKENS, proposing_endpoint
from mgrpo.rewards.judges.prompt_context import shortened, token_counter
from mgrpo.rewards.rubrics.proposals import read_proposals, render
from mgrpo.types import Criterion, JudgedRubric

_log = logging.getLogger(__name__)
_TEMPERATURE = 0.0
_LOGGED = 3


class Proposer(Asker):
    """Asks `rubric_generation_model`, once for each group, with the limits that judges have."""

    name: ClassVar[str] = "rubric_generation"

    def __init__(self, settings: Reward) -> None:
        super().__init__(settings, proposing_endpoint(settings), temperature=_TEMPERATURE)
        self.num_failed = 0

    async def propose_all(
        self, rubrics: Sequence[JudgedRubric], answers: Sequence[Sequence[str]]
    ) -> list[list[Criterion] | None]:
        """New criteria for each group, in order, asked for at once; None where the judge gave none that can be read."""
        return list(await asyncio.gather(*map(self._propose, rubrics, answers)))

    async def _propose(self, rubric: JudgedRubric, completions: Sequence[str]) -> list[Criterion] | None:
        if len(completions) < 2:
            return []  # nothing to tell apart
        try:
            prompt, mark = self._prompt(rubric, [encodable(final_answer(text)) for text in completions])
            return await self.client.ask(prompt, functools.partial(read_proposals, mark=mark))
        except Exception as err:  # of any kind: the group is scored by the criteria that it has
            self.num_failed += 1
            if self.num_failed <= _LOGGED:
                _log.warning("no criteria were proposed for %.60r...: %r", rubric.question, err)
            return None

    def _prompt(self, rubric: JudgedRubric, answers: Sequence[str]) -> tuple[str, str]:
        """The prompt and its mark, with question and answers shortened where the context is too small."""
        settings, count = self.settings, token_counter(self.client.endpoint.model)
        empty, _ = render("", rubric.criteria, [""] * len(answers))
        room = settings.llm_judge_max_context_length - settings.llm_judge_max_tokens - SPARE_TOKENS - count(empty)
        if room < FEWEST_TOKENS * (1 + len(answers)):
            raise ValueError(
                f"llm_judge_max_context_length={settings.llm_judge_max_context_length} leaves {max(room, 0)} tokens for the "
                f"question and {len(answers)} answers beside llm_judge_max_tokens={settings.llm_judge_max_tokens}, the template "
                "and the criteria; raise it"
            )
        question, *shorter = shortened([encodable(rubric.question), *answers], room, count)
        return render(question, rubric.criteria, shorter)
