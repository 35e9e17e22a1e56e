"""Advantages of turns, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mgrpo.algo.credit.turn_credit import TurnCredit
from mgrpo.algo.training_samples import train_samples
from mgrpo.config.algorithm import NAMED_ESTIMATORS
from mgrpo.types import Completion, ScoredGroup
from tests import builders

NAN = float("nan")


def of_turns(mask: str, *rewards: float) -> Completion:
    """A trajectory with a turn for each stretch of ones, and the rewards of all turns but the last."""
    record = builders.trajectory(mask)
    turns = tuple(
        builders.turn(turn.start, turn.end, reward=reward)
        for turn, reward in zip(record.turns, [*rewards, 99.0], strict=True)
    )
    return builders.completion(len(mask), trajectory=builders.trajectory(mask, turns=turns))


def credited(groups: list[ScoredGroup], credit: TurnCredit | None, normalization: str = "centered", **more):
    return train_samples(groups, normalization=normalization, ddof=0, eps=0.0, turn_credit=credit, **more)


def test_a_turn_is_worth_what_came_after_it():
    """Of the group's four turns, one came after a reward that it had no part in."""
    first, second = of_turns("11001", 1.0), of_turns("1101", 4.0)
    groups = [builders.scored_group([2.0, 0.0], completions=[first, second])]
    # Returns: 1 + 2 and 2; 4 + 0 and 0. Their mean is 2.25.
    one, other = credited(groups, TurnCredit())
    assert one.token_advantages.tolist() == [0.75, 0.75, 0.75, 0.75, -0.25]
    assert other.token_advantages.tolist() == [1.75, 1.75, 1.75, -2.25]
    assert one.token_advantages.dtype == np.float32
    # The mean over sampled tokens only.
    assert one.advantage == pytest.approx((0.75 + 0.75 - 0.25) / 3)
    assert one.loss_mask.tolist() == [True, True, False, False, True]


def test_the_last_turn_has_what_the_sum_leaves_to_it():
    """The reward of a summed trajectory holds its steps already: they would count twice."""
    groups = [builders.scored_group([7.0, 1.0], completions=[of_turns("101", 2.0), builders.completion(2)])]
    # Returns: 7 and 7 - 2; 1. Their mean is 13 / 3.
    one, other = credited(groups, TurnCredit(aggregator="sum"))
    assert one.token_advantages[[0, 2]].tolist() == pytest.approx([7 - 13 / 3, 5 - 13 / 3])
    assert other.token_advantages.tolist() == pytest.approx([1 - 13 / 3] * 2)


@pytest.mark.parametrize("normalization", [name for name in NAMED_ESTIMATORS if name != "gdpo"])
@pytest.mark.parametrize("rewards", [[[1.0, 0.0, NAN], [3.0, 1.0, 2.0]], [[1.0], [3.0]]])
def test_trajectories_of_one_turn_have_the_advantages_of_trajectories(normalization, rewards):
    """The oracle is the other formula: with one turn each they are the same, also without a score and in a batch of one each."""
    groups = [
        builders.scored_group(
            own, completions=[builders.completion(3, trajectory=builders.trajectory("111"))] * len(own)
        )
        for own in rewards
    ]
    dropped = [builders.scored_group([5.0] * len(rewards[0]))]
    plain = credited(groups, None, normalization, dropped=dropped)
    for found, expected in zip(credited(groups, TurnCredit(), normalization, dropped=dropped), plain, strict=True):
        assert found.token_advantages.tolist() == pytest.approx([expected.advantage] * 3)
        assert found.advantage == pytest.approx(expected.advantage)
        assert expected.token_advantages is None


def test_groups_may_have_different_numbers_of_turns():
    """Turns that a shorter group does not have would count as rewards of 0."""
    longer = builders.scored_group([2.0, 2.0], completions=[of_turns("10101", 3.0, 1.0), of_turns("1")])
    shorter = builders.scored_group([5.0, 3.0], completions=[of_turns("1"), of_turns("1")])
    # Returns of the first: 6, 3, 2; 2. Their mean is 3.25.
    first, second, third, fourth = credited([longer, shorter], TurnCredit())
    assert first.token_advantages[[0, 2, 4]].tolist() == [2.75, -0.25, -1.25]
    assert second.token_advantages.tolist() == [-1.25]
    assert (third.advantage, fourth.advantage) == (1.0, -1.0)


def test_leave_one_out_compares_a_turn_with_those_of_other_completions():
    """A turn in its own baseline, or beside its own later turns, would be compared with what it has caused itself."""
    groups = [
        builders.scored_group([2.0, 4.0, 0.0], completions=[of_turns("1101", 1.0), of_turns("1"), of_turns("11")])
    ]
    # Returns: 3 and 2; 4; 0.
    first, second, third = credited(groups, TurnCredit(), "rloo")
    assert first.token_advantages.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert second.token_advantages.tolist() == pytest.approx([4 - 5 / 3])
    assert third.token_advantages.tolist() == [-3.0, -3.0]


def test_turns_weigh_with_their_tokens_in_a_mean_over_tokens():
    """Two tokens of the first turn, one of the second, two of another completion: (2 x 3 + 1 x 2 + 2 x 0) / 5 = 1.6."""
    groups = [builders.scored_group([2.0, 0.0], completions=[of_turns("11001", 1.0), of_turns("11")])]
    std = ((2 * 1.4**2 + 0.4**2 + 2 * 1.6**2) / 5) ** 0.5
    one, other = credited(groups, TurnCredit(), "reinforce_plus_plus")
    assert one.token_advantages[[0, 1, 4]].tolist() == pytest.approx([1.4 / std, 1.4 / std, 0.4 / std])
    assert other.token_advantages.tolist() == pytest.approx([-1.6 / std] * 2)
    # What tools have written is trained on as well: it stands behind the first turn.
    one, _ = credited(groups, TurnCredit(), "reinforce_plus_plus", mask_tool_use=False)
    mean = (4 * 3 + 1 * 2) / 7
    std = ((4 * (3 - mean) ** 2 + (2 - mean) ** 2 + 2 * mean**2) / 7) ** 0.5
    assert one.token_advantages[[0, 3, 4]].tolist() == pytest.approx([(3 - mean) / std] * 2 + [(2 - mean) / std])


def test_with_one_completion_a_prompt_all_turns_of_the_batch_are_compared():
    """Compared with its own turns alone, a trajectory that fails throughout would learn nothing."""
    groups = [builders.scored_group([r], completions=[of_turns("101", 0.0)]) for r in (4.0, 0.0)]
    one, other = credited(groups, TurnCredit())
    assert one.token_advantages.tolist() == [2.0] * 3 and other.token_advantages.tolist() == [-2.0] * 3


def test_turns_of_a_trajectory_without_a_score_are_in_no_mean():
    """A worker that died would change what the others' turns are compared with."""
    lost = builders.completion(0, trajectory=builders.trajectory("", ended_by="error"))
    groups = [builders.scored_group([2.0, NAN, NAN], completions=[of_turns("101", 1.0), of_turns("101", 50.0), lost])]
    one, unscored, never_began = credited(groups, TurnCredit())
    assert one.token_advantages.tolist() == [0.5, 0.5, -0.5]
    assert not unscored.token_advantages.any() and not unscored.loss_mask.any()
    assert never_began.token_advantages.tolist() == [0.0]


def test_rewards_by_function_have_no_turns():
    """Silently leaving the turns out would train something else than what was asked for."""
    groups = [builders.scored_group([1.0, 0.0], parts=[{"f": 1.0}, {"f": 0.0}])]
    with pytest.raises(ValueError, match="turn_credit=return needs one reward for each turn"):
        credited(groups, TurnCredit(), "gdpo", reward_weights={"f": 1.0})
