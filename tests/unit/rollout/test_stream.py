"""The rule of admission and choice against random histories: every order in which groups may finish, vanish and begin again."""

from __future__ import annotations

import random
from math import ceil

import pytest

from mgrpo.rollout.stream import Stream


def sorted_choice(own: Stream) -> list[int] | None:
    """The groups of the next step, by sorting all that are out."""
    chosen = sorted(own.born)[: own.group_count]
    if own.is_ordered:
        return chosen if len(chosen) == own.group_count and own.finished.issuperset(chosen) else None
    oldest_first = sorted(own.finished, key=lambda number: (own.born[number], number))
    chosen = sorted(oldest_first[: own.group_count])
    births = sorted(own.born[number] for number in own.born.keys() - set(chosen))
    in_time = all(born + own.bound >= own.steps + 1 + place // own.group_count for place, born in enumerate(births))
    can_go = in_time or own.finished.issuperset(own.born)
    return chosen if len(chosen) == own.group_count and can_go else None


def stream(**settings) -> Stream:
    return Stream(**{"group_count": 4, "num_steps": 10} | settings)


def random_stream(rng: random.Random) -> Stream:
    count, ahead = rng.randint(1, 6), rng.randint(0, 4)
    extra, sync_steps = rng.choice((0, 0, rng.randint(0, 2 * count))), rng.choice((1, 1, 2, 5))
    bound = ahead + ceil(extra / count) + sync_steps - 1 + rng.choice((0, 0, 1, 3))
    num_steps = rng.randint(1, 30)
    return Stream(group_count=count, num_steps=num_steps, ahead=ahead, bound=bound, extra=extra, sync_steps=sync_steps)


class History:
    """One run in which anything may happen to a group before it is taken."""

    def __init__(self, seed: int, *, is_calm: bool = False) -> None:
        self.rng, self.is_calm = random.Random(seed), is_calm
        self.own = random_stream(self.rng)
        self.steps: list[list[int]] = []
        self.ages: list[list[int]] = []
        self.most_out = 0

    def run(self) -> None:
        own = self.own
        while own.steps < own.num_steps:
            if own.updates < own.steps and self.rng.random() < 0.7:
                own.update()
            if own.room > 0:
                own.admit(own.room)
            self.most_out = max(self.most_out, len(own.born))
            chosen = own.choose()
            assert chosen == sorted_choice(own)
            if chosen is not None:
                self.ages.append([own.steps - own.born[number] for number in chosen])
                self.steps.append(chosen)
                own.take(chosen)
            elif own.updates < own.steps:
                own.update()
            else:
                self.happen()

    def happen(self) -> None:
        own, rng = self.own, self.rng
        running = sorted(own.born.keys() - own.finished)
        assert running, "all that is out has finished, and no step can be taken: a deadlock"
        chance, number = 1.0 if self.is_calm else rng.random(), rng.choice(running)
        if chance < 0.05:
            own.replay(rng.sample(running, max(1, len(running) // 3)))
        elif chance < 0.2:
            own.give_back(number)
        else:
            own.finish(number)


@pytest.mark.parametrize("part", range(4))
def test_nothing_is_too_old_or_lost_or_taken_twice_and_nothing_blocks(part: int) -> None:
    """A thousand histories each: groups that finish in any order, have no signal, or begin again on another engine."""
    for seed in range(1000 * part, 1000 * (part + 1)):
        history = History(seed)
        history.run()
        own = history.own
        assert max(max(ages) for ages in history.ages) <= own.bound, seed
        taken = [number for step in history.steps for number in step]
        assert len(set(taken)) == len(taken) == own.num_steps * own.group_count, seed
        assert history.most_out <= (own.ahead + 1) * own.group_count + own.extra, seed


def test_with_equal_numbers_the_order_is_that_of_admission_and_the_age_is_exactly_that_number() -> None:
    """A run that repeats to the bit needs batches that do not depend on which engine was faster."""
    for seed in range(2000):
        history = History(seed, is_calm=True)
        own = history.own
        own.bound, own.extra = own.ahead + own.sync_steps - 1, 0
        while own.steps < own.num_steps:
            own.update()
            own.admit(own.room)
            while (chosen := own.choose()) is None:
                history.happen()
            history.steps.append(chosen)
            history.ages.append([own.steps - own.born[number] for number in chosen])
            own.take(chosen)
        taken = [number for step in history.steps for number in step]
        assert taken == list(range(own.num_steps * own.group_count)), seed
        begun = [max(step - own.ahead, 0) for step in range(own.num_steps)]
        ages = [step - at + at % own.sync_steps for step, at in enumerate(begun)]
        assert history.ages == [[age] * own.group_count for age in ages], seed


def test_between_weight_syncs_groups_begin_with_the_age_of_the_weights() -> None:
    """Counted from the step before them, tokens of older weights would pass for younger ones, and the limit would not hold."""
    own = stream(sync_steps=3, bound=2)
    ages = []
    for step in range(7):
        own.admit(own.room)
        for number in own.born:
            own.finish(number)
        chosen = own.choose()
        ages.append({step - own.born[number] for number in chosen})
        own.take(chosen)
        own.update()
    assert own.is_ordered and ages == [{0}, {1}, {2}, {0}, {1}, {2}, {0}]


def test_a_synchronous_run_has_one_step_out_and_nothing_before_its_weights() -> None:
    """What is admitted for the next step waits until the engines have its weights."""
    own = stream()
    assert list(own.admit(own.room)) == [0, 1, 2, 3] and own.room == 0
    for number in (2, 0, 3):
        own.finish(number)
        assert own.choose() is None
    own.finish(1)
    own.take(own.choose())
    assert own.room == 0
    own.update()
    assert own.room == 4 and list(own.admit(4)) == [4, 5, 6, 7] and set(own.born.values()) == {1}


def test_a_second_number_frees_the_order_without_aging_the_batch() -> None:
    """The step takes what has finished, and waits only when the straggler would become too old."""
    own = stream(group_count=2, ahead=1, bound=2)
    own.admit(own.room)
    own.finish(1), own.finish(2)
    assert own.choose() == [1, 2]
    own.take([1, 2])
    own.update()
    assert list(own.admit(own.room)) == [4, 5]
    own.finish(3), own.finish(4)
    # The straggler may still come in the next step, at the age of 2.
    assert own.choose() == [3, 4]
    own.take([3, 4])
    own.update()
    assert list(own.admit(own.room)) == [6, 7]
    own.finish(5), own.finish(6)
    assert own.choose() is None
    own.finish(0)
    assert own.choose() == [0, 5]


def test_a_place_that_is_given_back_is_filled_again() -> None:
    """Places that are lost would dry up the pipeline, place by place."""
    own = stream(ahead=1, bound=1)
    own.admit(own.room)
    for number in (0, 5):
        own.give_back(number)
    assert own.room == 2 and list(own.admit(2)) == [8, 9]


def test_the_last_steps_admit_no_more_than_they_train_on() -> None:
    """Answers that no step will take are engine time for nothing."""
    own = stream(num_steps=3, ahead=4, bound=4)
    assert own.room == 12
    own.admit(12)
    for step in range(3):
        assert own.room == 0
        for number in range(4 * step, 4 * step + 4):
            own.finish(number)
        own.take(own.choose())
        own.update()
    assert own.room == 0 and not own.born


def test_a_group_that_begins_again_is_as_young_as_the_weights_that_sample_it() -> None:
    """With its old birth the rule would wait for a deadline in the past."""
    own = stream(group_count=1, ahead=1, bound=2)
    own.admit(own.room)
    own.finish(0)
    own.take(own.choose())
    own.update()
    own.replay([1])
    assert own.born[1] == 1


def test_what_has_all_finished_is_taken_however_old_it_is() -> None:
    """A run that is resumed with fewer prompts a step has more groups than its deadlines allow, and would wait for ever."""
    own = stream(group_count=1, ahead=1, bound=2)
    for number in range(8):
        own.restore(number, 0)
        own.finish(number)
    own.steps = own.updates = 1
    assert own.choose() == [0]
