"""Rubrics: the weighted mean of criteria judged one by one."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards import verify
from mgrpo.rewards.judges.client import NoVerdict
from mgrpo.rewards.registry import find
from mgrpo.rewards.verifier import Answer
from tests.unit.rewards.scripted_judge import Reply, Request, ScriptedJudge, says
from tests.unit.rewards.test_judge import blocks_of


def criterion(verdict: object, weight: object = None, *, key: str = "description") -> dict:
    """A criterion that names the verdict the scripted judge will give on it."""
    row = {key: f"gets {verdict}"}
    return row if weight is None else row | {"weight": weight}


def by_description(request: Request) -> Reply:
    return says(json.dumps({"score": json.loads(blocks_of(request.prompt)["criterion"].removeprefix("gets "))}))


def score(
    label: object, script=by_description, *, completion: str = "an answer", **settings
) -> tuple[float, ScriptedJudge]:
    with ScriptedJudge(script) as server:
        config = {"llm_judge_model": "hosted_vllm/judge", "llm_judge_base_url": server.url} | settings
        verifier = find("rubric")(Reward(**config))
        verifier.client.backoff_s = 0.01

        async def run() -> float:
            try:
                return await verifier.score(
                    Answer(completion=completion, ground_truth=label, prompt="user: the prompt")
                )
            finally:
                await verifier.close()

        return asyncio.run(run()), server


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([criterion(2)], 1.0),
        ([criterion(1)], 0.5),
        ([criterion(0)], 0.0),
        ([criterion(2, 3), criterion(0, 1)], 0.75),
        ([criterion(2, 3), criterion(1, 1)], 3.5 / 4),
        # A fault that is there takes its weight away, one that is not takes nothing.
        ([criterion(2, 3), criterion(2, -1)], 2 / 4),
        ([criterion(2, 3), criterion(0, -1)], 3 / 4),
        ([criterion(2, -1)], -1.0),
        ([criterion(0, 1), criterion(2, -1)], -0.5),
        ([criterion(1, 0.1), criterion(2, 0.2), criterion(2, -0.3)], (0.05 + 0.2 - 0.3) / 0.6),
        # Of weight 0, or without a description: not asked, and no matter.
        ([criterion(2, 1), criterion(0, 0)], 1.0),
        ([criterion(2, 1), {"description": " ", "weight": 5}], 1.0),
    ],
)
def test_the_score_is_the_weighted_mean_by_hand(rows, expected):
    """Weights divided by their sum instead of the sum of their sizes explode when faults weigh as much as merits."""
    value, server = score({"query": "q", "rubrics": rows})
    assert value == pytest.approx(expected)
    assert len(server.requests) == sum(bool(row.get("weight", 1) and row["description"].strip()) for row in rows)


def test_random_rubrics_agree_with_the_formula():
    """The oracle is the formula, written once more in plain arithmetic."""
    draw = random.Random(0)
    for _ in range(10):
        verdicts = [draw.choice([0, 0.5, 1, 1.5, 2]) for _ in range(draw.randint(1, 8))]
        weights = [draw.choice([-3, -1.5, -1, 0.25, 1, 2, 7]) for _ in verdicts]
        rows = [criterion(verdict, weight) for verdict, weight in zip(verdicts, weights, strict=True)]
        expected = sum(w * v / 2 for w, v in zip(weights, verdicts, strict=True)) / sum(abs(w) for w in weights)
        assert score({"query": "q", "rubrics": rows})[0] == pytest.approx(expected)


@pytest.mark.parametrize("key", ["description", "rubric_item", "Ingredient"])
@pytest.mark.parametrize(
    "wrap", [lambda label: label, json.dumps, lambda label: [json.dumps(label)], lambda label: [label]]
)
def test_every_form_of_label_is_read(key, wrap):
    """Data sets for Open Instruct write them in all these ways; one that is not read scores nothing for a whole run."""
    value, server = score(wrap({"Question": "why?", "rubrics": [criterion(2, 1, key=key), criterion(1, key=key)]}))
    assert value == pytest.approx(0.75)
    assert blocks_of(server.prompts[0])["question"] == "why?"


def test_the_judge_sees_question_criterion_and_final_answer_of_one_criterion_at_a_time():
    """Criteria judged together colour each other; thinking is not the answer."""
    label = {"rubrics": [{"description": "polite"}, {"description": "short"}]}
    value, server = score(label, says('{"score": 2}'), completion="<think>rude draft</think><answer>Hello.</answer>")
    assert value == 1.0
    assert sorted(blocks_of(prompt)["criterion"] for prompt in server.prompts) == ["polite", "short"]
    for prompt in server.prompts:
        assert blocks_of(prompt)["question"] == "user: the prompt" and blocks_of(prompt)["answer"] == "Hello."
        assert "rude draft" not in prompt
    assert server.requests[0].body["temperature"] == 0.0


@pytest.mark.parametrize(
    "label",
    [
        "not json", "[1, 2]", "[" * 100_000, 7, None, [], {}, {"query": "q"}, {"rubrics": []}, {"rubrics": "polite"},
        {"rubrics": ["polite"]}, {"rubrics": [{"weight": 1}]}, {"rubrics": [criterion(2, "heavy")]},
        {"rubrics": [criterion(2, True)]}, {"rubrics": [criterion(2, math.nan)]}, {"rubrics": [criterion(2, math.inf)]},
        {"rubrics": [criterion(2, 0), criterion(1, 0)]}, {"rubrics": [{"description": 5}]},
        {"rubrics": [{"description": "polite", "weight": None}]},
    ],
    ids=lambda label: repr(label)[:40],
)  # fmt: skip
def test_a_label_that_is_no_rubric_is_an_error_and_nobody_is_asked(label):
    """A mistake in the data must not look like a wrong answer, and must not cost requests."""
    with ScriptedJudge(says('{"score": 2}')) as server:
        config = Reward(llm_judge_model="hosted_vllm/judge", llm_judge_base_url=server.url)
        with pytest.raises(ValueError, match="ground_truth"):
            asyncio.run(find("rubric")(config).score(Answer(completion="a", ground_truth=label)))
    assert not server.requests


@pytest.mark.parametrize(
    "bad", [says("well"), says('{"score": 3}'), says('{"score": -1}'), says('{"score": true}'), Reply(status=500)]
)
def test_one_criterion_without_a_verdict_leaves_the_answer_without_a_score(bad):
    """Counted as 0, a failed judgement of a merit is a penalty and of a fault a reward."""
    label = {"rubrics": [criterion(2, 1), criterion("x", -1), criterion(1, 1)]}
    with pytest.raises(NoVerdict, match="3 attempts"):
        score(label, lambda request: bad if "gets x" in request.prompt else by_description(request))


def test_criteria_are_judged_at_the_same_time_within_the_limit():
    """One after the other, twenty criteria take twenty times as long as one."""
    label = {"rubrics": [criterion(2)] * 20}
    value, server = score(label, says('{"score": 2}', wait_s=0.2), remote_verifier_concurrency=8)
    assert value == 1.0 and 1 < server.most_at_once <= 8


def test_the_first_failure_ends_the_other_requests():
    """A model name that does not exist would be asked for once a criterion, and slow ones be waited for."""

    def script(request: Request) -> Reply:
        return Reply(status=404) if "gets 0" in request.prompt else says('{"score": 2}', wait_s=60)

    begun = time.monotonic()
    with pytest.raises(NoVerdict, match="404"):
        score({"rubrics": [criterion(2), criterion(0), criterion(1)]}, script)
    assert time.monotonic() - begun < 20


def test_rubrics_reach_the_public_door():
    """What callers see is a number, or NaN for none."""
    with ScriptedJudge(by_description) as server:
        settings = {"llm_judge_model": "hosted_vllm/judge", "llm_judge_base_url": server.url}
        assert verify("rubric", "a", {"query": "q", "rubrics": [criterion(1, 2)]}, **settings) == 0.5
        assert math.isnan(verify("rubric", "a", {"query": "q"}, **settings))
