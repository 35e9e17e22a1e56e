"""From turns that were sampled to the branches of a trajectory: which of them, in which order, after what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mgrpo.environments.agents.recorded_tree import RecordedTree
from mgrpo.environments.loop.trajectory import Sampled, Trajectory
from mgrpo.types import Completion


def sampled(*tokens: int, reason: str = "stop") -> Sampled:
    return Sampled(
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -1.0, np.float32),
        policy_versions=np.full(len(tokens), 3, np.int32),
        finish_reason=reason,
    )


def grown(*turns: tuple[int | None, list[int], list[int]], rewrites: tuple[int, ...] = ()) -> RecordedTree:
    """From each turn's parent, what is added to that, and what is sampled."""
    tree = RecordedTree()
    for number, (parent, added, tokens) in enumerate(turns):
        tree.ask(number, parent, added, number in rewrites)
        tree.sampled(number, sampled(*tokens))
    return tree


def end(delivered: set[int], number: int, **fields: Any) -> dict[str, Any]:
    turns = [
        {
            "number": one,
            "delivered": one in delivered,
            "message": {"role": "assistant", "content": f"turn {one}"},
            "calls": ["look"] if one == 0 else [],
            "num_unreadable": int(one == 1),
        }
        for one in range(number)
    ]
    return {"turns": turns, "roots": [], "added": {}} | fields


def completion(trajectory: Trajectory) -> Completion:
    return trajectory.completion(text_of=lambda tokens: [str(each.tolist()) for each in tokens], scored_text="final")


def branches(
    tree: RecordedTree, delivered: set[int], prompt: list[int] | None = None
) -> list[tuple[list[int], list[int], list[bool], int]]:
    """Of each branch: its context, its tokens, which of them were sampled, and its parent."""
    row = None if prompt is None else np.array(prompt, np.int32)
    trajectory = tree.trajectory(end(delivered, len(tree._turns)), prompt=row)
    made = completion(trajectory)
    assert made.trajectory is not None
    return [
        (
            one.prompt_tokens.tolist(),
            made.tokens[one.start : one.end].tolist(),
            made.trajectory.is_sampled[one.start : one.end].tolist(),
            one.parent,
        )
        for one in made.trajectory.branches
    ]


def test_a_straight_line_is_one_branch() -> None:
    tree = grown((None, [1, 2], [3, 4]), (0, [5], [6]), (1, [], [7]))
    assert tree.ask(3, 2, [8]).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    tree.failed(3)
    assert branches(tree, {0, 1, 2}) == [([1, 2], [3, 4, 5, 6, 7], [True, True, False, True, True], -1)]
    assert (tree.num_tokens, tree.num_turns) == (5, 3)


def test_a_row_that_is_asked_as_it_is_needs_no_branch() -> None:
    """Its group's samples then share the prompt."""
    tree = grown((None, [1, 2], [3]))
    assert branches(tree, {0}, prompt=[1, 2]) == []
    assert branches(tree, {0}, prompt=[1]) == [([1, 2], [3], [True], -1)]
    fork = grown((None, [1, 2], [3]), (0, [4], [5]), (0, [6], [7]))
    prompt = np.array([1, 2], np.int32)
    trajectory = fork.trajectory(end({0, 1, 2}, 3), prompt=prompt)
    made = completion(trajectory).trajectory
    assert made is not None and made.branches[0].prompt_tokens is prompt and len(made.branches) == 2


def test_a_fork_goes_on_with_the_child_that_came_first() -> None:
    """Its other children have everything before them as context: no token is trained twice."""
    tree = grown((None, [1], [2]), (0, [3], [4]), (0, [5], [6]), (2, [7], [8]), (1, [9], [10]))
    assert branches(tree, set(range(5))) == [
        ([1], [2, 3, 4, 9, 10], [True, False, True, False, True], -1),
        ([1, 2, 5], [6, 7, 8], [True, False, True], 0),
    ]


def test_a_context_that_was_written_afresh_begins_a_branch() -> None:
    """A new root, or thinking that was left out: the tokens before are not those that were sampled."""
    tree = grown((None, [1], [2]), (None, [3, 4], [5]), (0, [1, 9], [6]), (2, [7], [8]), rewrites=(2,))
    assert branches(tree, set(range(4))) == [
        ([1], [2], [True], -1),
        ([3, 4], [5], [True], -1),
        ([1, 9], [6, 7, 8], [True, False, True], 0),
    ]
    assert tree.num_tokens == 5
    assert tree.ask(4, 3, [10]).tolist() == [1, 9, 6, 7, 8, 10]


def test_what_nobody_has_read_is_in_no_branch() -> None:
    """A client went away: what it would have done with the turn has no reward. One that another follows was read after all."""
    tree = grown((None, [1], [2]), (0, [3], [4]), (0, [9], [5]), (2, [6], [7]))
    assert branches(tree, {0, 1, 3}) == [
        ([1], [2, 3, 4], [True, False, True], -1),
        ([1, 2, 9], [5, 6, 7], [True, False, True], 0),
    ]
    assert branches(tree, {0, 1}) == [([1], [2, 3, 4], [True, False, True], -1)]
    assert branches(tree, {3}) == [([1], [2, 9, 5, 6, 7], [True, False, True, False, True], -1)]


def test_draws_that_the_agent_threw_away_are_dropped() -> None:
    """Of several draws for one request one was gone on with: the reward says nothing of the others."""
    tree = grown((None, [1], [2]), (0, [3], [4]), (0, [3], [5]), (0, [9], [6]), (2, [7], [8]), (None, [1], [10]))
    every = set(range(6))
    kept = [
        ([1], [2, 3, 5, 7, 8], [True, False, True, False, True], -1),
        ([1, 2, 9], [6], [True], 0),
        ([1], [10], [True], -1),
    ]
    # Another request at the same place is no draw, and the last turn that was read counts whatever it is.
    assert branches(tree, every) == kept
    assert branches(tree, every - {5}) == kept[:2]
    # Where none was gone on with, all count.
    alike = grown((None, [1], [2]), (None, [1], [3]))
    assert len(branches(alike, {0, 1})) == 2


def test_nothing_that_was_read_is_a_completion_without_tokens() -> None:
    """It has no score, and its group stays whole."""
    tree = grown((None, [1], [2]))
    for told in (end(set(), 1), end(set(), 0)):
        made = completion(tree.trajectory(told, prompt=np.array([1], np.int32)))
        assert len(made.tokens) == len(made.logprobs) == len(made.policy_versions) == 0
        assert made.trajectory is not None and made.trajectory.branches == () and made.trajectory.turns == ()
        assert made.scored_text == ""


def test_a_trajectory_ends_as_the_last_turn_that_was_read() -> None:
    """With the trees of agents it is not the last of the last branch."""
    tree = grown((None, [1], [2]), (0, [3], [4]), (0, [5], [6]))
    tree.ask(3, 1, [7])
    tree.sampled(3, sampled(8, reason="length"))
    for delivered, ended_by, content in (({0, 1, 2, 3}, "length", "turn 3"), ({0, 1, 2}, "stop", "turn 2")):
        trajectory = tree.trajectory(end(delivered, 4))
        assert (trajectory.ended_by, trajectory.last_content) == (ended_by, content)
    assert tree.trajectory(end(set(), 4)).ended_by == "error"


def test_messages_and_calls_go_with_their_branches() -> None:
    """A reward function reads the whole tree; a call's arguments are JSON on the wire, and objects here."""
    tree = grown((None, [1], [2]), (0, [3], [4]), (0, [5], [6]), (None, [7], [8]))
    user, answer = {"role": "user", "content": "x"}, {"role": "tool", "content": "y"}
    told = end(
        set(range(4)),
        4,
        roots=[{"number": 0, "messages": [user]}, {"number": 3, "messages": [user, user]}],
        added={"1": [answer], "2": [user]},
    )
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    broken = {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{"}}
    told["turns"][0]["message"]["tool_calls"] = [call, broken]
    trajectory = tree.trajectory(told)
    made = completion(trajectory).trajectory
    assert made is not None
    first = {"role": "assistant", "content": "turn 0"}
    first["tool_calls"] = [{**call, "function": {"name": "look", "arguments": {"x": 1}}}, broken]  # type: ignore[assignment]
    turns = [{"role": "assistant", "content": f"turn {number}"} for number in range(4)]
    assert [list(branch.messages) for branch in made.branches] == [
        [user, first, answer, turns[1]],
        [user, turns[2]],
        [user, user, turns[3]],
    ]
    assert list(made.messages) == [first, answer, turns[1], user, turns[2], turns[3]]
    assert [(turn.calls, turn.failed, turn.num_unreadable) for turn in made.turns[:2]] == [
        (("look",), (False,), 0),
        (("",), (True,), 1),
    ]
    assert (trajectory.num_calls, trajectory.num_calling_turns) == (2, 2)
    assert (made.scored_text, trajectory.is_calling) == ("turn 3", False)


@pytest.mark.parametrize(("number", "parent", "added"), [(0, None, [1]), (2, 7, [1]), (2, 1, [1]), (2, None, [])])
def test_turns_that_cannot_be_are_refused(number: int, parent: int | None, added: list[int]) -> None:
    """The other process may be wrong; what is recorded here must not be."""
    tree = grown((None, [1], [2]))
    tree.ask(1, 0, [3])
    with pytest.raises(ValueError, match=r"cannot follow|has no context"):
        tree.ask(number, parent, added)


def test_a_branch_says_after_which_turn_it_goes_on() -> None:
    """The places are those of the trajectory, where turns lie in another order than they were sampled in."""
    tree = grown(
        (None, [1], [2]),
        (0, [3], [4]),
        (0, [5], [6]),
        (1, [7], [8]),
        (2, [9], [10]),
        (3, [11], [12]),
        (None, [13], [14]),
    )
    trajectory = tree.trajectory(end(set(range(7)), 7))
    found = [(one.parent, one.after) for one in (*trajectory.branches, trajectory._branch())]
    # Turns 0, 1, 3 and 5 in the first branch, 2 and 4 in the second.
    assert found == [(-1, -1), (0, 0), (-1, -1)]
    assert [turn.end - turn.start for turn in trajectory.turns] == [1] * 7
    assert completion(trajectory).tokens.tolist() == [2, 3, 4, 7, 8, 11, 12, 6, 9, 10, 14]


def test_the_first_branch_tells_the_prompt_only_where_the_group_has_another() -> None:
    """A reader has the prompt of the group before him already."""
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    told = {"roots": [{"number": 0, "messages": opening}], "added": {1: [{"role": "user", "content": "more"}]}}
    for rewrites in ((), (1,)):
        tree = grown((None, [1], [2]), (0, [3], [4]), rewrites=rewrites)
        trajectory = tree.trajectory(end({0, 1}, 2, **told))
        for has_own_context in (True, False):
            trajectory.has_own_context = has_own_context
            made = completion(trajectory).trajectory
            assert made is not None
            said = [message["content"] for branch in made.branches for message in branch.messages]
            without = ["turn 0", "more", "turn 1"] if made.branches else []
            assert said == (["s", "u", *without] if has_own_context else without)
            assert len(made.branches) == (2 if rewrites else has_own_context)
