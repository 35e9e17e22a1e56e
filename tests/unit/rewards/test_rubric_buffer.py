"""The criteria that stay in use: as Open Instruct's own functions choose them, and whatever the order in which groups were scored."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mgrpo.rewards.rubrics.buffer import MOST_INACTIVE, Evolved, RubricBuffer, plain_rubric, read_rubric, with_criteria
from mgrpo.types import Criterion, JudgedRubric, ScoredGroup
from tests import builders

CASES = json.loads((Path(__file__).parent / "rubrics_of_open_instruct.json").read_text())
LABEL = {"query": "q", "rubrics": [{"description": "row"}]}


def criteria(rows) -> tuple[Criterion, ...]:
    return tuple(Criterion(description, weight) for description, weight in rows)


def judged(
    rubric: JudgedRubric, index: int = 0, *, rewards: tuple[float, ...] | None = None, label: object = LABEL
) -> ScoredGroup:
    """A group that was scored by this rubric."""
    of = builders.prompt(id=(0, index), verifiers=["rubric"], ground_truths=(label,))
    count = len(rubric.verdicts)
    completions = [builders.completion(text=f"answer {number}") for number in range(count)]
    scored = builders.scored_group(rewards or (0.0,) * count, completions=completions, of=of)
    return ScoredGroup(group=scored.group, scores=scored.scores, rubric=rubric)


def rubric_of(*columns: tuple[str, tuple[float, ...]], question: str = "q", num_new: int | None = None) -> JudgedRubric:
    """A rubric with the row's criterion first; each column is a criterion and its verdicts on all answers."""
    names, verdicts = zip(*columns, strict=True)
    return JudgedRubric(
        question=question,
        criteria=criteria((name, 1.0) for name in names),
        num_persistent=1,
        num_new=num_new,
        verdicts=tuple(zip(*verdicts, strict=True)),
    )


@pytest.mark.parametrize("case", CASES, ids=[f"step {number}" for number in range(len(CASES))])
def test_a_step_changes_what_open_instructs_functions_change(case):
    """Its functions were recorded on random criteria and verdicts; metrics of these names must be these numbers."""
    buffer = RubricBuffer(case["max_active"])
    buffer.questions = {
        question: Evolved(active=criteria(own["active_rubrics"]), inactive=criteria(own["inactive_rubrics"]))
        for question, own in case["before"].items()
    }
    groups = []
    for index, (question, rows) in enumerate(case["criteria"].items()):
        columns = [[math.nan if verdict is None else verdict for verdict in own] for own in case["verdicts"][question]]
        rubric = JudgedRubric(
            question=question,
            criteria=criteria(rows),
            num_persistent=len(case["before"][question]["persistent_rubrics"]),
            num_new=case["num_new"][index],
            verdicts=tuple(zip(*columns, strict=True)),
        )
        groups.append(judged(rubric, index))
    buffer.draw(groups)
    buffer.take()
    for question, own in case["after"].items():
        assert buffer.questions[question].active == criteria(own["active_rubrics"])
        assert set(buffer.questions[question].inactive) == set(criteria(own["inactive_rubrics"]))
    metrics = buffer.metrics()
    assert metrics["evolving_rubrics/num_overrides"] == 2
    for name, value in case["metrics"].items():
        # Where nothing was measured, it is 0 there and nothing here.
        assert metrics[name] == pytest.approx(value) or (math.isnan(metrics[name]) and value == 0), name


def test_the_recorded_steps_hold_every_case():
    """A record in which nothing is capped or left out would show nothing."""
    assert {case["max_active"] for case in CASES} == {1, 2, 3, 4}
    assert any(None in case["num_new"] for case in CASES)
    grown = [len(own["inactive_rubrics"]) for case in CASES for own in case["after"].values()]
    assert max(grown) > 4 and any(None in row for case in CASES for rows in case["verdicts"].values() for row in rows)


def test_by_hand():
    """Of three criteria in use and a new one: no spread, the least spread, and the two that stay."""
    buffer = RubricBuffer(2)
    buffer.questions["q"] = Evolved(active=criteria([("a", 1.0), ("b", 1.0), ("c", 1.0)]))
    columns = [("row", (0.0, 1.0)), ("a", (0.5, 0.5)), ("b", (0.5, 1.0)), ("c", (0.0, 0.9)), ("new", (0.0, 1.0))]
    buffer.draw([judged(rubric_of(*columns, num_new=1))])
    assert buffer.state_dict()["q"]["num_persistent"] == 0  # nothing changes before the step is taken
    buffer.take()
    own = buffer.questions["q"]
    assert [c.description for c in own.active] == ["c", "new"] and own.num_persistent == 1
    assert [c.description for c in own.inactive] == ["a", "b"]


def test_verdicts_on_one_answer_say_nothing_about_spread():
    """A judge that fails for all answers but one would take every criterion out of use."""
    nan = math.nan
    evolved = Evolved().after(rubric_of(("row", (0.0, 1.0)), ("new", (nan, 1.0)), num_new=1), 5)
    assert [c.description for c in evolved.active] == ["new"]


def test_rounding_is_no_spread():
    """The deviation of three equal verdicts of 0.65 is above 0 in floating point."""
    evolved = Evolved().after(rubric_of(("row", (0.0, 1.0, 1.0)), ("new", (0.65, 0.65, 0.65)), num_new=1), 5)
    assert not evolved.active


def test_a_criterion_that_is_proposed_again_is_in_use_again():
    """The policy changes: what no answer had may tell later answers apart. Listed twice it would be counted twice."""
    before = Evolved(inactive=criteria([("b", 1.0), ("a", 1.0)]))
    evolved = before.after(rubric_of(("row", (0.0, 1.0)), ("a", (0.0, 1.0)), num_new=1), 5)
    assert [c.description for c in evolved.active] == ["a"] and [c.description for c in evolved.inactive] == ["b"]


def test_what_is_kept_of_a_question_is_bounded():
    """The state of a long run would grow with every group."""
    evolved = Evolved()
    for step in range(MOST_INACTIVE + 20):
        evolved = evolved.after(rubric_of(("row", (0.0, 1.0)), (f"{step}", (0.5, 0.5)), num_new=1), 5)
    assert len(evolved.inactive) == MOST_INACTIVE and evolved.inactive[-1].description == f"{MOST_INACTIVE + 19}"


def test_two_groups_of_a_question_in_one_step_change_it_one_after_the_other():
    """Both were admitted with the same criteria; the second must not undo what the first has changed."""
    buffer = RubricBuffer(5)
    first = rubric_of(("row", (0.0, 1.0)), ("a", (0.0, 1.0)), num_new=1)
    second = rubric_of(("row", (0.0, 1.0)), ("a", (0.5, 0.5)), ("b", (0.0, 1.0)), num_new=2)
    for _ in range(2):  # asked again for the same step, it is the same
        buffer.draw([judged(first, 0), judged(second, 0)])
    buffer.take()
    assert [c.description for c in buffer.questions["q"].active] == ["b"]
    assert buffer.metrics()["evolving_rubrics/num_overrides"] == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"verifiers": ["Rubric"], "ground_truths": (LABEL,)}, ("a",)),
        ({"verifiers": ["integer", "rubric"], "ground_truths": (1, [json.dumps(LABEL)])}, ("a",)),
        ({"verifiers": ["rubric"], "ground_truths": ({"rubrics": [{"description": "row"}]},), "query": "q"}, ("a",)),
        ({"verifiers": ["rubric"], "ground_truths": (LABEL | {"query": "other"},)}, ()),
        ({"verifiers": ["integer"]}, None),
        # The verifier cannot read these either, and gives no score; the run must not end.
        ({"verifiers": ["rubric"], "ground_truths": ("[",)}, None),
        ({"verifiers": ["rubric"], "ground_truths": ({"query": "q", "rubrics": []},)}, None),
    ],
)
def test_a_prompt_gets_the_criteria_in_use_for_its_question(fields, expected):
    """Criteria of another question, or of none, would score answers by what nobody has asked."""
    buffer = RubricBuffer(5)
    buffer.questions["q"] = Evolved(active=criteria([("a", 1.0)]), inactive=criteria([("b", 1.0)]))
    own = buffer.admitted(builders.prompt(**fields)).criteria
    assert own == expected if expected is None else [c.description for c in own] == list(expected)
    assert RubricBuffer(None).admitted(builders.prompt(**fields)).criteria is None


def test_state_and_waiting_groups_survive_json():
    """A resumed run must judge by the same criteria, to the last bit of a verdict."""
    buffer, again = RubricBuffer(5), RubricBuffer(5)
    rubric = rubric_of(("row", (0.0, 1 / 3)), ("a", (math.nan, 0.1)), ("new", (1.0, 0.5)), num_new=1)
    buffer.draw([judged(rubric)])
    buffer.take()
    again.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert again.questions == buffer.questions and buffer.questions["q"].active
    prompt = buffer.admitted(judged(rubric).group.prompt)
    record = json.loads(json.dumps(plain_rubric(prompt, judged(rubric))))
    assert with_criteria(judged(rubric).group.prompt, record).criteria == prompt.criteria != ()
    assert repr(read_rubric(record)) == repr(rubric)
    plain = builders.prompt()
    assert with_criteria(plain, plain_rubric(plain, None)).criteria is None
    assert read_rubric({}) is None  # of an earlier version
    off = RubricBuffer(None)
    off.load_state_dict(buffer.state_dict())
    assert off.questions == {} and off.metrics() == {}


def test_records_say_what_was_judged_and_what_stays():
    """The only place where a user reads the criteria; they must be JSON."""
    buffer = RubricBuffer(5)
    rubric = rubric_of(("row", (0.0, 1.0)), ("old", (0.5, 0.5)), ("new", (math.nan, 1.0)), num_new=1)
    buffer.questions["q"] = Evolved(active=criteria([("old", 1.0)]))
    buffer.draw([judged(rubric, 7), ScoredGroup(group=judged(rubric).group, scores=())])
    (record,) = json.loads(json.dumps(buffer.records, allow_nan=False))
    assert record["prompt_idx"] == 7 and record["question"] == "q" and record["is_proposed"]
    assert record["responses"] == ["answer 0", "answer 1"]
    assert [(row["description"], row["kind"], row["verdicts"]) for row in record["rubrics"]] == [
        ("row", "persistent", [0.0, 1.0]),
        ("old", "active", [0.5, 0.5]),
        ("new", "new", [None, 1.0]),
    ]
    assert [row["description"] for row in record["active_rubrics"]] == ["new"]
    assert [row["description"] for row in record["inactive_rubrics"]] == ["old"]
