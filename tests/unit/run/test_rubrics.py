"""Rubrics that evolve are state of the run: the same in whatever order groups come back, and in a run that is resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mgrpo.types import Criterion, JudgedRubric, Prompt, PromptId, RewardContext, RolloutGroup, ScoredBatch
from tests.builders import prompt
from tests.scripted_engine import ScriptedEngine
from tests.unit.run.producing import ScriptedRewarder, collect, evaluator, producer

SETTINGS = {"apply_evolving_rubric_reward": True, "max_active_rubrics": 2, "num_unique_prompts_rollout": 4}
TURNS = {}
IN_ORDER = {"async_steps": 1, "use_rho_correction": True}
IN_FLIGHT = IN_ORDER | {"inflight_updates": True}


def rubric_prompt(prompt_id: PromptId, opening: str = "") -> Prompt:
    """Of three questions, some of which a step has twice."""
    label = {"query": f"question {prompt_id[1] % 5 // 2}", "rubrics": [{"description": "row"}]}
    return prompt(id=prompt_id, verifiers=["rubric"], ground_truths=(label,))


class RubricRewarder(ScriptedRewarder):
    """Proposes a criterion for each group, whose spread depends on the row; remembers the criteria that prompts came with."""

    def __init__(self) -> None:
        super().__init__(lambda index: (0.0, 1.0))
        self.criteria: dict[PromptId, tuple[Criterion, ...]] = {}

    def score(self, groups: Sequence[RolloutGroup], context: RewardContext) -> ScoredBatch:
        batch = super().score(groups, context)
        scored = [replace(own, rubric=self._rubric(own.group.prompt)) for own in batch.groups]
        return replace(batch, groups=scored, logged={})

    def _rubric(self, of: Prompt) -> JudgedRubric | None:
        if of.criteria is None:
            return None
        assert of.id not in self.criteria or self.criteria[of.id] == of.criteria
        self.criteria[of.id] = of.criteria
        row = of.id[1]
        criteria = (Criterion("row", 1.0), *of.criteria, Criterion(f"new {of.id}", -1.0, "New"))
        return JudgedRubric(
            question=of.ground_truths[0]["query"],
            criteria=criteria,
            num_persistent=1,
            num_new=1 if row % 7 else None,
            verdicts=((0.0,) * len(criteria), tuple((row + place) % 4 / 3 for place in range(len(criteria)))),
        )


def evolving(engine: ScriptedEngine | None = None, **settings):
    own = producer(engine=engine, **SETTINGS, **settings)
    own.groups.prompt = rubric_prompt
    own.rewarder = own.scoring.rewarder = RubricRewarder()
    return own


def settle(own) -> None:
    """Wait until the producer has done what there is to do."""
    for _ in range(3):
        own.thread.submit(lambda: own.scoring.thread.submit(lambda: None)).result().result()
    own.thread.submit(lambda: None).result()


def state_of(own) -> dict:
    """The state of a run as a file has it."""
    state = own.state_dict()
    arrays = state.pop("rollouts", {})
    return json.loads(json.dumps(state)) | {"rollouts": arrays}


def train(own, engine: ScriptedEngine, steps: int, *, order=lambda numbers: numbers) -> list:
    """Steps of a run whose engine answers one by one in an order of its own; metrics and records of each."""
    found = []
    for _ in range(steps):
        own.begin()
        settle(own)
        for number in order(sorted(engine.queued)):
            engine.answer(number)
            settle(own)
        rollouts = collect(own)
        found.append((rollouts.reward_metrics, list(rollouts.rubrics)))
        own.thread.submit(own._pause).result().result(10)
    return found


def test_criteria_come_back_with_their_question() -> None:
    """In the next step that has the question, and not in the one that is under way, whose groups are sampled already."""
    own = evolving(engine := ScriptedEngine(answers=False))
    train(own, engine, 1)
    assert set(own.rewarder.criteria.values()) == {()}
    train(own, engine, 4)
    later = own.rewarder.criteria[(0, 6)]
    assert later and all(criterion.description.startswith("new (0, ") for criterion in later)
    assert max(map(len, own.rewarder.criteria.values())) == 2


@pytest.mark.parametrize("settings", [TURNS, IN_ORDER], ids=["turns", "asynchronous"])
def test_the_order_in_which_groups_come_back_makes_no_difference(settings) -> None:
    """It depends on the load of engines and judges; a run could not be repeated."""
    runs = []
    for order in (list, lambda numbers: numbers[::-1], lambda numbers: sorted(numbers, key=lambda n: (n * 7) % 5)):
        own = evolving(engine := ScriptedEngine(answers=False), **settings)
        runs.append(
            (train(own, engine, 7, order=order), sorted(own.rewarder.criteria.items()), own.groups.rubrics.questions)
        )
    assert repr(runs[0]) == repr(runs[1]) == repr(runs[2])


@pytest.mark.parametrize("settings", [TURNS, IN_ORDER, IN_FLIGHT], ids=["turns", "asynchronous", "in flight"])
def test_a_resumed_run_judges_as_the_uninterrupted_one(settings) -> None:
    """Half an epoch of criteria would be lost with every death, or counted twice."""
    own = evolving(engine := ScriptedEngine(answers=False), **settings)
    train(own, engine, 5)
    state = state_of(own)
    again = evolving(its_engine := ScriptedEngine(answers=False), **settings)
    again.load_state_dict(state)
    assert again.groups.rubrics.questions == own.groups.rubrics.questions
    assert json.dumps(state_of(again)["groups"]) == json.dumps(state["groups"])
    # Groups that both have are scored once, those that begin again by what they began with.
    assert repr(train(again, its_engine, 4)) == repr(train(own, engine, 4))
    assert own.groups.rubrics.questions == again.groups.rubrics.questions
    assert again.rewarder.criteria.items() <= own.rewarder.criteria.items()


def test_a_state_taken_while_a_step_is_under_way_has_the_criteria_before_it() -> None:
    """The step is sampled again as a whole; its criteria would be added to those that it has already added."""
    own = evolving()
    collect(own)
    before = state_of(own)["rubrics"]
    own.dispatcher.wait(own.take())
    assert before and state_of(own)["rubrics"] == before
    own.hand_over(prepare=False)
    assert state_of(own)["rubrics"] != before


def test_evaluations_and_other_runs_have_the_criteria_of_the_rows() -> None:
    """Accuracies could not be compared over a run; and a run without the setting must be what it was."""
    own = evaluator(**SETTINGS)
    own.rewarder = RubricRewarder()
    own.prompts = [rubric_prompt((0, index)) for index in range(3)]
    own.evaluate(0)
    assert own.rewarder.criteria == {}
    off = producer()
    off.groups.prompt = rubric_prompt
    rollouts = collect(off)
    assert rollouts.groups[0].group.prompt.criteria is None and not rollouts.rubrics
    assert not any(name.startswith("evolving") for name in rollouts.reward_metrics) and state_of(off)["rubrics"] == {}
