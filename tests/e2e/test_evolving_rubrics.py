"""A run whose rubrics evolve, with a scripted judge: killed and started again it is judged as if it had never died."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.interrupted import Job, metrics, origins, weights
from tests.e2e.launching import Run
from tests.e2e.test_asynchronous import TIMES
from tests.unit.rewards.scripted_judge import Reply, Request, ScriptedJudge, says
from tests.unit.rewards.test_evolving_rubrics import mark_of, proposal
from tests.unit.rewards.test_judge import blocks_of

QUESTIONS = ("1+2=", "3+4=", "10+9=", "5+20=", "7+7=", "12+8=")
COSTS = re.compile("objective/rubric.*_(requests|tokens)")


def judge(request: Request) -> Reply:
    """Proposes for the first two answers what they end in, and gives verdicts on answers by their ends."""
    blocks = blocks_of(request.prompt)
    if "criterion" in blocks:
        end = blocks["criterion"].removeprefix("ends in ")
        return says(json.dumps({"score": 2 if blocks["answer"].endswith(end) else len(blocks["answer"]) % 2}))
    ends = [f"ends in {blocks[f'answer {number}'][-1:] or 'nothing'}" for number in (1, 2)]
    return says(proposal(mark_of(request.prompt), ends[:1], ends[1:]))


def job(folder: Path, url: str) -> Job:
    """Of six questions a step takes four, so that each comes back after a step or two."""
    rows = [{"prompt": question, "ground_truth": label(question)} for question in QUESTIONS]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row | {"dataset": "theirs"}) for row in rows))
    return Job(
        flags=[
            *("--dataset_mixer_list", str(folder / "rows.jsonl"), "1.0"),
            *(
                "--remap_verifier",
                "theirs=rubric",
                "--apply_evolving_rubric_reward",
                "true",
                "--max_active_rubrics",
                "2",
            ),
            *("--llm_judge_model", "hosted_vllm/judge", "--llm_judge_base_url", url, "--local_eval_every", "-1"),
            *("--num_unique_prompts_rollout", "4", "--num_samples_per_prompt_rollout", "4", "--total_episodes", "128"),
            *("--async_steps", "1", "--checkpoint_state_freq", "3", "--warm_up_steps", "2"),
        ]
    )


def label(question: str) -> dict:
    total = sum(map(int, question.rstrip("=").split("+")))
    return {"query": question, "rubrics": [{"description": f"ends in {total}", "weight": 2}]}


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "evolving_rubrics.jsonl").read_text().splitlines()]


def without_costs(run: Run) -> list[dict]:
    """What is equal in a resumed run: a process counts what it has asked since its own start."""
    return [
        {name: value for name, value in line.items() if name not in TIMES and not COSTS.fullmatch(name)}
        for line in metrics(run)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_dies_is_judged_on_by_the_same_criteria(tmp_path):
    """Criteria that are lost with a death, or added twice, make another reward."""
    with ScriptedJudge(judge) as server:
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()
        own, folders = job(tmp_path, server.url), [tmp_path / "one" / "rubrics", tmp_path / "two" / "rubrics"]
        flags = [["--cache_evolving_rubric_data_dir", str(folder)] for folder in folders]
        whole = own.finish(tmp_path / "one", flags[0])
        own.fail(tmp_path / "two", flags[1], fault="kill sync", step=5)
        again = own.finish(tmp_path / "two", flags[1])
    assert origins(again) == [3]
    assert without_costs(again) == without_costs(whole) and weights(again) == weights(whole)
    assert records(folders[0]) == records(folders[1])
    steps = [line for line in metrics(whole) if "reward" in line]
    assert len(steps) == 8 and all(step["evolving_rubrics/valid_rate"] == 1 for step in steps)
    assert steps[-1]["evolving_rubrics/total_active"] > 0 and steps[-1]["evolving_rubrics/total_inactive"] > 0
    assert steps[-1]["objective/rubric_generation_requests"] >= 8 * 4
    written = records(folders[0])
    assert len(written) == 8 * 4 and {record["question"] for record in written} == set(QUESTIONS)
    kinds = [rubric["kind"] for record in written for rubric in record["rubrics"]]
    assert {"persistent", "active", "new"} == set(kinds)
    assert max(len(record["active_rubrics"]) for record in written) == 2
