"""New criteria for a group: the model that reads its answers, the prompt, and the criteria in the reply.

The reply is untrusted: it is read as JSON with bounds on its size, and nothing of it is used but the texts of criteria. As with
verdicts (`judges.replies`), the prompt gives the judge a mark that no answer can predict and without which a reply does not count.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Sequence
from typing import ClassVar

from mgrpo.config.schema import Reward
from mgrpo.rewards.judges.asking import Asker, encodable, final_answer
from mgrpo.rewards.judges.endpoint import FEWEST_TOKENS, SPARE_TOKENS, proposing_endpoint
from mgrpo.rewards.judges.judgements import FENCES, unused_mark
from mgrpo.rewards.judges.prompt_context import shortened, token_counter
from mgrpo.rewards.judges.replies import Unreadable, json_forms, without_thinking
from mgrpo.types import Criterion, JudgedRubric

_log = logging.getLogger(__name__)
_TEMPERATURE = 0.0
_LOGGED = 3
ASKED_FOR = 5
"""Criteria that a reply should have at most."""
MOST_PROPOSED = 10
"""A reply with more is unreadable: each costs a verdict on every answer of the group."""
MOST_CHARACTERS = {"description": 2000, "title": 200}
_WEIGHTS = {"positive_rubrics": 1.0, "negative_rubrics": -1.0}
_OBJECTS = json.JSONDecoder(strict=False)

_TASK = f"""\
You write the criteria by which an assistant's answers to a question are graded. You are given the question, the criteria in \
use, and several answers to it.

Read all answers and find out what separates the better ones from the worse ones. Where the criteria in use do not capture \
that, propose new ones:
- A positive criterion describes a merit that some of these answers have and others lack.
- A negative criterion describes a fault that some of these answers have: something they do wrong, not something they leave out.

A criterion that all of these answers would meet, or none, is of no use. Nor is one that says again what a criterion in use or \
another one of yours says, or the opposite of one. Make each specific enough that somebody who sees one answer alone can tell \
whether it applies. Propose at most {ASKED_FOR} in all, rather fewer; where the criteria in use say it all, none."""
_REPLY = """\
Reply with one JSON object and nothing else. The mark shows that the proposals are yours. Either list may be empty:
{"MARK": "{mark}", "positive_rubrics": [{"title": "<two to five words>", "description": "<the merit>"}], \
"negative_rubrics": [{"title": "<two to five words>", "description": "<the fault>"}]}"""


class Proposer(Asker):
    """Calls the model of RUBRIC_GENERATION_MODEL, once for each group, with the limits that judges have."""

    name: ClassVar[str] = "rubric_generation"

    def __init__(self, settings: Reward) -> None:
        super().__init__(settings, proposing_endpoint(settings), temperature=_TEMPERATURE)
        self.num_failed = 0

    async def propose_all(
        self, rubrics: Sequence[JudgedRubric], answers: Sequence[Sequence[str]]
    ) -> list[list[Criterion] | None]:
        """New criteria for each group, in order, requested at once; None where the judge gave none that can be read."""
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


def render(question: str, in_use: Sequence[Criterion], answers: Sequence[str]) -> tuple[str, str]:
    """The whole prompt, and its mark."""
    listed = "\n".join(f"- ({'positive' if c.weight > 0 else 'negative'}) {c.description}" for c in in_use)
    mark = unused_mark(question, listed, "\n".join(answers))
    blocks = {"question": question, "criteria": listed}
    blocks |= {f"answer {number}": answer for number, answer in enumerate(answers, start=1)}
    fenced = [f"BEGIN {name} {mark}\n{text}\nEND {name} {mark}" for name, text in blocks.items()]
    return "\n\n".join([_TASK, FENCES.format(mark=mark), *fenced, _REPLY.replace("{mark}", mark)]), mark


def read_proposals(reply: str, *, mark: str) -> list[Criterion]:
    """The criteria in the first JSON object of the reply, those of merits first; `Unreadable` for any other reply."""
    visible = without_thinking(reply)
    found = _object_in(visible)
    if found is None or found.get("MARK") != mark:
        raise Unreadable(f"the reply holds no JSON object with the prompt's mark: {visible[:200]!r}")
    criteria = [_criterion(row, weight) for name, weight in _WEIGHTS.items() for row in _rows(found.get(name), name)]
    if len(criteria) > MOST_PROPOSED:
        raise Unreadable(f"the reply proposes {len(criteria)} criteria; at most {MOST_PROPOSED} are read")
    return criteria


def _object_in(text: str) -> dict | None:
    start = text.find("{")
    for form in json_forms(text[start:]) if start >= 0 else ():
        try:
            found, _ = _OBJECTS.raw_decode(form)
        except (ValueError, RecursionError):
            continue
        return found
    return None


def _rows(rows: object, name: str) -> list:
    if not isinstance(rows, list):
        raise Unreadable(f"{name} is not a list: {rows!r:.80}")
    return rows


def _criterion(row: object, weight: float) -> Criterion:
    texts = {}
    for name, most in MOST_CHARACTERS.items():
        text = row.get(name, "") if isinstance(row, dict) else None
        if not isinstance(text, str) or len(text) > most:
            raise Unreadable(f"a proposal is not an object with a description and a title: {row!r:.80}")
        texts[name] = text.strip()
    if not texts["description"]:
        raise Unreadable(f"a proposal has no description: {row!r:.80}")
    return Criterion(weight=weight, **texts)
