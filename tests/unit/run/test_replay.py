"""Groups of earlier steps in place of those without a signal."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from mgrpo.config.validate import problems, warnings
from mgrpo.layout import Layout
from mgrpo.moving import GRPOConfig, from_values
from mgrpo.parallel import backend
from mgrpo.run.produce.replay import ReplayBuffer
from mgrpo.types import ScoredGroup
from tests.builders import scored_group
from tests.scripted_engine import ScriptedEngine
from tests.unit.run.producing import collect, producer

NAN = float("nan")
EQUAL, MIXED = (1.0, 1.0), (0.0, 1.0)
ON = {"replay_buffer_size": 6, "use_rho_correction": True, "rho_clamp_upper_bound": 2.0}


def scored(*rewards: float) -> ScoredGroup:
    return scored_group(rewards)


def spreads(buffer: ReplayBuffer) -> list[float]:
    return [float(np.ptp(own.scored.rewards)) for own in buffer.stored]


def buffer_of(*spreads: float, size: int = 9, bound: int | None = None, born: int = 0, seed: int = 1) -> ReplayBuffer:
    buffer = ReplayBuffer(size, bound=bound, seed=seed)
    buffer.add([(scored(0.0, spread), born) for spread in spreads], steps=born + 1)
    return buffer


def test_the_groups_whose_rewards_differ_most_are_kept_and_of_equal_ones_the_newest() -> None:
    """Old groups that are worth no more would be replayed for ever, ever further from the policy."""
    buffer = buffer_of(1.0, 3.0, 2.0, 1.0, size=3)
    assert spreads(buffer) == [3.0, 2.0, 1.0]
    buffer.add([(scored(0.0, 1.0), 5), (scored(0.5, 1.0), 5)], steps=6)
    assert spreads(buffer) == [3.0, 2.0, 1.0] and [own.born for own in buffer.stored] == [0, 0, 5]


def test_the_priority_is_the_advantages_times_the_deviation() -> None:
    """TRL's; completions without a score have no advantage."""
    rewards = np.array([0.0, 1.0, 1.0, 4.0])
    advantages = (rewards - rewards.mean()) / rewards.std()
    buffer = ReplayBuffer(2, bound=None, seed=1)
    buffer.add([(scored(*rewards), 0), (scored(0.0, NAN, 2.0, NAN), 0)], steps=1)
    assert [own.priority for own in buffer.stored] == pytest.approx([np.abs(advantages).sum() * rewards.std(), 2.0])


def test_groups_are_drawn_without_replacement_in_proportion_to_their_priority() -> None:
    """Two of three, with chances 4 : 2 : 1: the pairs' chances are those of one draw after the other."""
    drawn: Counter[tuple[float, ...]] = Counter()
    buffer, count = buffer_of(4.0, 2.0, 1.0), 4000
    for steps in range(count):
        buffer.draw(2, steps=steps)
        drawn[tuple(own.priority for own in buffer.drawn)] += 1
    pairs = {
        (4.0, 2.0): 4 / 7 * 2 / 3 + 2 / 7 * 4 / 5,
        (4.0, 1.0): 4 / 7 / 3 + 1 / 7 * 4 / 6,
        (2.0, 1.0): 2 / 7 / 5 + 1 / 7 / 3,
    }
    assert sum(pairs.values()) == pytest.approx(1) and drawn.keys() == pairs.keys()
    assert all(drawn[pair] / count == pytest.approx(share, abs=0.03) for pair, share in pairs.items())


def test_a_draw_depends_on_the_seed_and_the_step_alone() -> None:
    """A resumed run draws the same, and asking twice changes nothing."""

    def draws(seed: int) -> list[list[float]]:
        buffer = buffer_of(*(1 + number / 100 for number in range(9)), seed=seed)
        found = []
        for steps in (3, 4, 3):
            buffer.draw(4, steps=steps)
            found.append([own.priority for own in buffer.drawn])
        return found

    first, second, again = draws(1)
    assert first == again != second and draws(1) == [first, second, first] and draws(2)[0] != first


def test_no_more_is_drawn_than_there_is_and_nothing_that_is_too_old() -> None:
    """max_staleness is a promise about every group that is trained on."""
    buffer = buffer_of(1.0, 2.0, bound=3)
    for steps, expected in ((3, 2), (4, 0)):
        buffer.draw(9, steps=steps)
        assert len(buffer.drawn) == expected
    buffer.add([], steps=4)
    assert not buffer.stored, "and takes no room"


def test_rewards_that_differ_only_by_function_are_drawn_last() -> None:
    """gdpo keeps groups whose sums are equal; a chance of 0 would be a division by it."""
    buffer = ReplayBuffer(4, bound=None, seed=1)
    buffer.add([(scored(1.0, 1.0), 0), (scored(0.0, 1.0), 0)], steps=1)
    for steps in range(20):
        buffer.draw(1, steps=steps)
        assert [own.priority for own in buffer.drawn] == [1.0]
    buffer.draw(2, steps=1)
    assert len(buffer.drawn) == 2


def later_ones_are_equal(index: int) -> tuple[float, ...]:
    """The first step has a signal in every group, later ones in every other group."""
    return MIXED if index < 4 or index % 2 else EQUAL


def rows(groups) -> list[int]:
    return [own.group.prompt.id[1] for own in groups]


def test_groups_without_a_signal_are_replaced_by_as_many_of_earlier_steps() -> None:
    """The batch stays full while the policy solves more and more prompts."""
    own = producer(later_ones_are_equal, **ON)
    first, second, third = collect(own), collect(own), collect(own)
    assert (rows(first.groups), rows(first.dropped), rows(first.replayed)) == ([0, 1, 2, 3], [], [])
    assert (rows(second.groups), rows(second.dropped)) == ([5, 7], [4, 6])
    assert len(second.replayed) == 2 and set(rows(second.replayed)) < {0, 1, 2, 3}
    assert set(rows(third.replayed)) < {0, 1, 2, 3, 5, 7}
    assert first.replay_metrics == pytest.approx(
        {"replay/groups": 0, "replay/age_mean": NAN, "replay/age_max": NAN, "replay/stored": 0}, nan_ok=True
    )
    assert second.replay_metrics == {"replay/groups": 2, "replay/age_mean": 1, "replay/age_max": 1, "replay/stored": 4}
    assert third.replay_metrics["replay/stored"] == 6


def test_without_a_buffer_nothing_is_replayed_or_measured() -> None:
    """Its metrics would be columns of nothing in every run."""
    own = producer(later_ones_are_equal)
    collect(own)
    rollouts = collect(own)
    assert rows(rollouts.groups) == [5, 7] and not rollouts.replayed and not rollouts.replay_metrics
    assert own.state_dict()["replay"] == []


def test_a_replayed_group_is_trained_on_with_its_own_logprobs_advantages_and_ages() -> None:
    """The correction divides by the probabilities of the policy that sampled it, not by those of the present one."""
    backend.install()  # before the first import of Megatron
    from mgrpo.run.produce.step_batch import make_batch

    own = producer(later_ones_are_equal, **ON)
    first, second = collect(own), collect(own)
    batch = make_batch(
        second, own.groups.config, layout=Layout(world_size=1), hidden=8, reward_weights={}, policy_version=3
    )
    assert len(batch.samples) == 8 and batch.num_sampled == 4
    completions = [one for own in second.replayed for one in own.group.completions]
    for sample, completion in zip(batch.samples[4:], completions, strict=True):
        assert sample.rollout_logprobs.tolist() == completion.logprobs.tolist()
        assert sample.ages is not None and sample.ages.tolist() == (3 - completion.policy_versions).tolist()
    assert [sample.advantage for sample in batch.samples] == pytest.approx([-1, 1] * 4)
    assert sorted({sample.group for sample in batch.samples}) == [0, 1, 2, 3]
    assert not {*rows(second.replayed)} - {*rows(first.groups)}


def saved(own) -> dict:
    """The state, through JSON."""
    state = own.state_dict()
    arrays = state.pop("rollouts")
    return {**json.loads(json.dumps(state)), "rollouts": {name: array.copy() for name, array in arrays.items()}}


def facts(rollouts) -> list:
    """Everything that training reads of the groups."""
    return [
        (own.group.prompt.id, own.scores, [(c.tokens.tolist(), c.logprobs.tolist(), c.policy_versions.tolist(), c.text) for c in own.group.completions])
        for own in (*rollouts.groups, *rollouts.replayed)
    ]  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"max_staleness": 2}, {"async_steps": 1}])
def test_a_resumed_run_replays_the_same_groups(settings) -> None:
    """What was sampled by weights that are gone cannot be sampled again; it is part of the state."""
    settings = {**ON, "async_steps": 0} | settings
    own = producer(later_ones_are_equal, engine=ScriptedEngine(), **settings)

    def step(which) -> list:
        found = collect(which)
        if settings["async_steps"]:
            which.pause()
            which.begin()
        return [*facts(found), which.groups.buffer.metrics()]

    for _ in range(3):
        step(own)
    state = saved(own)
    again = producer(later_ones_are_equal, engine=ScriptedEngine(), **settings)
    again.load_state_dict(state)
    assert len(again.groups.buffer.stored) == len(own.groups.buffer.stored) > 3
    for _ in range(2):
        expected = step(own)
        assert expected[-1]["replay/groups"] == 2
        assert step(again) == expected


def test_a_state_taken_while_a_batch_is_under_way_has_the_buffer_of_before() -> None:
    """SIGTERM finds a batch that has been drawn, and whose groups have not been trained on."""
    own = producer(later_ones_are_equal, **ON)
    collect(own)
    before = saved(own)
    own.dispatcher.wait(own.take())
    assert saved(own)["replay"] == before["replay"]
    own.hand_over(prepare=False)
    assert len(saved(own)["replay"]) == 6


def test_a_resumed_run_with_other_settings_takes_what_it_can_use() -> None:
    """Groups of another size cannot be in a batch; a smaller buffer keeps fewer; states of older versions have none.

    Where one of two runs cuts what is sampled from, a group of the other has no meaning in its loss.
    """
    own = producer(later_ones_are_equal, **ON)
    collect(own)
    state = saved(own)
    old = {name: value for name, value in state.items() if name != "replay"}
    three = {"num_samples_per_prompt_rollout": 3}
    num_tokens = len(state["rollouts"]["replay_tokens"])
    sets = {
        "replay_kept_ids": np.arange(num_tokens, dtype=np.int32),
        "replay_kept_sizes": np.ones(num_tokens, np.int32),
    }
    cut, top_k = state | {"rollouts": state["rollouts"] | sets}, {"top_k": 4}
    smaller = {"replay_buffer_size": 2}
    of_runs = ((smaller, state, 2), (three, state, 0), ({}, old, 0), ({}, cut, 0), (top_k, state, 0))
    for settings, given, expected in (*of_runs, (top_k | smaller, cut, 2)):
        again = producer(later_ones_are_equal, **ON | settings)
        again.load_state_dict(given)
        assert len(again.groups.buffer.stored) == expected
    plain = producer(later_ones_are_equal)
    plain.load_state_dict(state)
    assert not collect(plain).replayed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, None),
        ({"use_rho_correction": False, "rho_clamp_upper_bound": 0.0, "use_vllm_logprobs": True}, None),
        ({"use_rho_correction": False}, "replay_buffer_size=6 trains on tokens of older policies, which needs a correction"),
        ({"active_sampling": True}, "replay_buffer_size=6 and active_sampling=true both replace the groups left out"),
        ({"filter_zero_std_samples": False}, "replay_buffer_size=6 replaces the groups that filter_zero_std_samples leaves out"),
        ({"max_staleness": 0}, "which max_staleness=0 forbids"),
        ({"max_staleness": 4, "async_steps": 0}, None),
    ],
)  # fmt: skip
def test_what_a_buffer_needs_is_said_before_the_start(settings, words) -> None:
    """Old tokens without a correction are trained on as if the present policy had sampled them."""
    found = [text for text in problems(from_values(ON | settings), world_size=1) if "replay_buffer_size" in text]
    assert len(found) == (words is not None) and all(words in sentence for sentence in found)


def test_trls_default_size_is_not_lost() -> None:
    """Fields of an object that have their class's default count as not given; that of GRPOWithReplayBufferConfig is 64."""

    @dataclass
    class GRPOWithReplayBufferConfig:
        replay_buffer_size: int = 64

    assert GRPOConfig.from_trl(GRPOWithReplayBufferConfig()).algorithm.replay_buffer_size == 64
    assert GRPOConfig.from_trl({}).algorithm.replay_buffer_size == 0


def test_a_loss_of_ones_own_is_told_of_old_tokens_and_max_staleness_has_its_effect() -> None:
    """The warning that it has none would be wrong."""
    found = warnings(from_values(ON | {"policy_loss": "a.py:f", "max_staleness": 3, "async_steps": 0}), world_size=1)
    assert any("a.py:f is trained on tokens of older policies (replay_buffer_size=6)" in text for text in found)
    assert not any(text.startswith("max_staleness") for text in found)
