"""What was sampled, through the state of a run and back."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from mgrpo.run.produce.saved_rollouts import packed, unpacked
from mgrpo.types import AgentRecord, Completion, RolloutGroup, Turn
from tests import builders
from tests.unit.packing.test_document import equal_scores

TURNS = (
    Turn(start=0, end=2, calls=("search", "python"), failed=(False, True), seconds=(0.25, 1.5), reward=0.5),
    Turn(start=4, end=5, num_unreadable=1, num_unknown=2),
)
MESSAGES = (
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search", "arguments": {"query": "é"}}}]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "42"},
)
RECORD = builders.trajectory(
    "11001",
    turns=TURNS,
    messages=MESSAGES,
    ended_by="done",
    scored_text="42",
    sampled_text="é\n42",
    reward=0.1,
    metrics={"counter/count": 3.0},
    snapshot={"moves": [1, 2], "board": None},
)


def group(*completions: Completion, index: int = 0) -> RolloutGroup:
    return builders.rollout_group(completions, builders.prompt(id=(0, index)))


def through_a_state(groups: dict[int, RolloutGroup]) -> dict[int, RolloutGroup]:
    """As a checkpoint keeps them: records as text, and arrays without empty ones."""
    records, arrays = packed(groups)
    records = json.loads(json.dumps({str(number): record for number, record in records.items()}))
    kept = {name: array for name, array in arrays.items() if array.size}
    return {number: unpacked(own.prompt, records[str(number)], kept) for number, own in groups.items()}


def assert_equal(found: Completion, expected: Completion) -> None:
    for name in ("tokens", "logprobs", "policy_versions", "loss_mask"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist(), name
    assert (found.kept and builders.sets_of(found.kept)) == (expected.kept and builders.sets_of(expected.kept))
    assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
    assert (found.trajectory is None) == (expected.trajectory is None)
    if found.trajectory and expected.trajectory:
        neutral = {"is_sampled": None, "branches": ()}
        assert dataclasses.replace(found.trajectory, **neutral) == dataclasses.replace(expected.trajectory, **neutral)
        ours, theirs = (
            [
                (
                    one.start,
                    one.end,
                    one.parent,
                    one.after,
                    one.messages,
                    one.prompt_tokens.dtype,
                    one.prompt_tokens.tolist(),
                )
                for one in own
            ]
            for own in (found.trajectory.branches, expected.trajectory.branches)
        )
        assert ours == theirs


def test_trajectories_come_back_whole():
    """A resumed run would train on tool output, or score the tool's answer as the model's."""
    groups = {
        3: group(builders.completion(3, text="plain é"), builders.completion(2, version=4)),
        4: group(
            builders.completion(2, text="x"),
            builders.completion(5, version=2, text="é <tool> 42", trajectory=RECORD),
            builders.completion(0, trajectory=builders.trajectory("", ended_by="error")),
            index=1,
        ),
    }
    found = through_a_state(groups)
    for number, own in groups.items():
        for ours, theirs in zip(found[number].completions, own.completions, strict=True):
            assert_equal(ours, theirs)


def test_branches_come_back_with_their_contexts():
    """Their tokens would be trained after a context that they were not sampled from."""
    several = (builders.branch(0, 2), builders.branch(4, 5, [5, 6, 7]))
    branches = dataclasses.replace(RECORD, branches=several)
    others = dataclasses.replace(RECORD, branches=(builders.branch(0, 2, [8]), builders.branch(4, 5, [9, 1, 1, 1])))
    groups = {
        1: group(builders.completion(2), builders.completion(5, trajectory=branches)),
        2: group(
            builders.completion(5, trajectory=RECORD), builders.completion(5, trajectory=others), builders.completion(1)
        ),
    }
    found = through_a_state(groups)
    for number, own in groups.items():
        for ours, theirs in zip(found[number].completions, own.completions, strict=True):
            assert_equal(ours, theirs)


def test_trees_of_agents_come_back_whole():
    """The report of a resumed run would show a list of turns, and forget how the agent ended."""
    agent = AgentRecord(ended="crashed", status=3, output="é\n", seconds=1.5, counts={"retries": 2.0})
    first, second = builders.branch(0, 2), builders.branch(4, 5, [5, 6, 7])
    branches = (first, dataclasses.replace(second, parent=0, after=0, messages=MESSAGES))
    record = dataclasses.replace(RECORD, branches=branches, agent=agent)
    expected = builders.completion(5, trajectory=record)
    found = through_a_state({1: group(expected)})[1].completions[0]
    assert_equal(found, expected)
    assert found.trajectory is not None and found.trajectory.agent == agent


def test_states_of_earlier_versions_are_read():
    """Their branches have neither a parent nor messages, and no agent drove them."""
    expected = builders.completion(5, trajectory=dataclasses.replace(RECORD, branches=(builders.branch(0, 5),)))
    records, arrays = packed({1: group(expected)})
    (trajectory,) = records[1]["trajectories"]
    del trajectory["agent"]
    trajectory["branches"] = [branch[:4] for branch in trajectory["branches"]]
    assert_equal(unpacked(builders.prompt(), json.loads(json.dumps(records[1])), arrays).completions[0], expected)


@pytest.mark.parametrize("sets", [[[7, 0], [1], []], [[], [], []]])
def test_sets_come_back_with_their_tokens(sets):
    """A resumed run would train what was under way over other sets than it was sampled from."""
    groups = {
        1: group(builders.completion(3, kept=builders.kept_tokens(*sets)), builders.completion(0, kept=builders.kept_tokens())),
        2: group(builders.completion(2, kept=builders.kept_tokens([0], [5, 1, 4]))),
    }  # fmt: skip
    found = through_a_state(groups)
    for number, own in groups.items():
        for ours, theirs in zip(found[number].completions, own.completions, strict=True):
            assert_equal(ours, theirs)


@pytest.mark.parametrize("k", [0, 3])
def test_what_teachers_have_said_comes_back_with_its_tokens(k):
    """A resumed run would learn from the scores of another completion, or ask the teacher for all of them again."""
    rng = np.random.default_rng(k)

    def taught(length: int) -> Completion:
        return dataclasses.replace(builders.completion(length), taught=builders.teacher_scores(length, k, rng))

    groups = {
        3: group(builders.completion(4), taught(3), builders.completion(0)),
        5: group(builders.completion(2), index=1),
        6: group(taught(1), taught(5), index=2),
    }
    found = through_a_state(groups)
    assert "taught" not in packed({5: groups[5]})[0][5]
    for number, own in groups.items():
        for ours, theirs in zip(found[number].completions, own.completions, strict=True):
            assert equal_scores(ours.taught, theirs.taught)


def test_without_trajectories_nothing_is_added():
    """States of earlier versions have neither the masks nor the records, and are read all the same."""
    records, arrays = packed({0: group(builders.completion(2), builders.completion(1))})
    assert arrays.keys() == {"tokens", "logprobs", "policy_versions", "texts"}
    assert records[0].keys() == {"cuts", "text_cuts", "finish_reasons"}
    (first, second) = unpacked(builders.prompt(), records[0], arrays).completions
    assert len(first.tokens) == 2 and second.trajectory is None


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_of_engines_are_kept(dtype):
    """A group that was saved without them would train other experts than those it was sampled with."""
    rng = np.random.default_rng(0)

    def routes(*lengths: int) -> tuple[np.ndarray, ...]:
        return tuple(rng.integers(0, np.iinfo(dtype).max, (n, 3, 2), dtype) for n in lengths)

    one, none, branched = routes(3), (), routes(2, 4)
    groups = {
        4: group(*(dataclasses.replace(builders.completion(2), routes=own) for own in (one, none))),
        7: group(builders.completion(1), index=1),
        9: group(dataclasses.replace(builders.completion(2), routes=branched), index=2),
    }
    found = through_a_state(groups)
    for number, own in groups.items():
        for left, right in zip(found[number].completions, own.completions, strict=True):
            assert len(left.routes) == len(right.routes)
            for ours, theirs in zip(left.routes, right.routes, strict=True):
                assert ours.dtype == dtype and np.array_equal(ours, theirs)
