"""The states of engines under every order of events."""

from __future__ import annotations

import random
from collections import Counter

from mgrpo.rollout.engines.members import AGAIN_S, GONE, RESTART_WINDOW, Members, State

AFTER = {
    State.STARTING: {State.STALE, State.SERVING, State.DEAD, State.RETIRED},
    State.STALE: {State.SERVING, State.SUSPECT, State.DEAD, State.RETIRED},
    State.SERVING: {State.SUSPECT, State.LEAVING, State.DEAD, State.RETIRED},
    State.SUSPECT: {State.STALE, State.SERVING, State.LEAVING, State.DEAD, State.RETIRED},
    State.LEAVING: {State.RETIRED},
    State.DEAD: {State.STARTING, State.RETIRED},
    State.RETIRED: set(),
}
"""What may follow each state."""


def members(count: int = 2, *, max_restarts: int | None = 3) -> Members:
    """They serve only what a sync gave them, are dead after 10 s, and start within 100 s."""
    own = Members(count, max_restarts=max_restarts, patience_s=10, start_s=100)
    own.require_weights()
    return own


def serving(count: int = 2, **settings) -> Members:
    """All have their first weights."""
    own = members(count, **settings)
    for number in range(count):
        own.loaded(number)
    sync(own)
    return own


def sync(own: Members, failing: tuple[int, ...] = ()) -> None:
    """A weight sync in which these engines die."""
    taking_part = own.syncing
    for number in taking_part:
        own.begin_transfer(number)
    for number in failing:
        own.died(number, "in the sync")
    own.num_syncs += 1
    for number in taking_part:
        own.end_transfer(number, is_synced=number not in failing)


def happen(own: Members, random_: random.Random) -> set[int]:
    """One event; the engines that have completed a sync in it."""
    number = random_.randrange(len(own.all))
    member = own[number]
    match random_.randrange(9):
        case 0:
            own.loaded(number)
        case 1 | 2:
            taking_part = own.syncing
            failing = tuple(n for n in taking_part if random_.random() < 0.2)
            sync(own, failing)
            return set(taking_part) - set(failing)
        case 3:
            own.heard(number)
        case 4:
            for late in own.pass_time(random_.choice((1, 4, 9)))[1]:
                own.died(late, "silent")
        case 5:
            own.died(number, "killed")
        case 6:
            for dead in own.numbers(lambda member: member.state is State.DEAD):
                own.restart(dead)
        case 7 if number in own.lasting and random_.random() < 0.2:
            own.leave(number)
        case 8 if member.state is State.LEAVING:
            own.retire(number)
    return set()


def test_only_a_sync_makes_an_engine_serve_and_what_is_gone_stays_gone() -> None:
    """An engine that serves weights of its own, or older ones, samples from another policy than its tokens say."""
    for seed in range(200):
        try:
            see_random_events(random.Random(seed))
        except AssertionError as err:
            raise AssertionError(f"with seed {seed}: {err}") from err


def see_random_events(random_: random.Random) -> None:
    """Check the states after each of 150 events."""
    own = members(3)
    holds_weights: set[int] = set()
    starts: Counter[int] = Counter()
    for _ in range(150):
        before = [(member.state, member.generation) for member in own.all]
        synced = happen(own, random_)
        holds_weights |= synced
        for number, (state, generation) in enumerate(before):
            member = own[number]
            if member.state is not state and not (state is State.STALE and number in synced):
                # A sync may also end with a death.
                assert member.state in AFTER[state], (state, member.state)
            assert generation <= member.generation <= generation + 1
            if member.generation > generation:
                assert state is State.DEAD and member.state is State.STARTING
                holds_weights.discard(number)
                starts[number] += 1
            if member.state in GONE:
                holds_weights.discard(number)
        assert set(own.open) <= set(own.sampling) <= holds_weights
        assert set(own.open) <= set(own.syncing) <= set(own.lasting)
        if random_.random() < 0.05 and len(own.all) < 6:
            assert own[own.add()].state is State.STARTING


def test_an_engine_is_given_up_after_too_many_deaths_in_a_row() -> None:
    """A broken node would otherwise be started again with every step, for ever."""
    own = serving()
    for death in range(4):
        assert own.died(0, f"death {death}")
        if death < 3:
            own.restart(0)
    assert own[0].state is State.RETIRED and own[0].reason == "death 3" and own.lasting == [1]


def test_an_engine_that_cannot_start_is_given_time() -> None:
    """It finds a GPU whose memory a killed process has not given back yet, and would use up its starts in a minute."""
    own = serving(max_restarts=9)
    waits = []
    for is_loaded in (False, False, True, False):
        own.died(0, "of whatever")
        waits.append(own.restart(0))
        if is_loaded:
            own.loaded(0)
    own.died(0, "of whatever")
    assert [*waits, own.restart(0)] == [0, AGAIN_S, 2 * AGAIN_S, 0, AGAIN_S]


def test_deaths_long_ago_do_not_count() -> None:
    """A run of weeks would lose all its engines, one after the other."""
    own = serving(max_restarts=1)
    for _ in range(5):
        assert own.died(0, "now and then")
        assert own[0].state is State.DEAD
        own.restart(0)
        own.loaded(0)
        for _ in range(RESTART_WINDOW):
            sync(own)
    assert own.died(0, "once")
    own.restart(0)
    assert own.died(0, "twice") and own[0].state is State.RETIRED


def test_an_engine_that_others_restart_is_never_given_up() -> None:
    """A server that somebody else owns comes back when it does."""
    own = serving(max_restarts=None)
    for _ in range(50):
        own.died(0, "away")
        own.restart(0)
    assert own[0].state is State.STARTING and own[0].generation == 50


def test_a_silent_engine_is_suspected_and_then_dead() -> None:
    """It gets no more groups while it may still answer, and loses those that it has when it does not."""
    own = serving()
    assert own.pass_time(5) == ([], [])
    own.heard(1)
    assert own.pass_time(1) == ([0], []) and own.open == [1] and own.sampling == [0, 1] and not own.is_settled
    assert own.heard(0) and own.open == [0, 1]
    own.pass_time(6)
    own.heard(1)
    assert own.pass_time(5) == ([], [0])
    own.died(0, "silent")
    assert own.syncing == own.lasting[1:] == [1]


def test_a_suspect_without_weights_does_not_come_back_to_serve() -> None:
    """It was silent before it got any."""
    own = members()
    own.loaded(0)
    own.pass_time(6)
    assert own[0].state is State.SUSPECT and own.heard(0) and own[0].state is State.STALE and own.sampling == []


def test_who_takes_over_weights_is_not_missed() -> None:
    """An engine core answers nothing until it has all of them, which has a limit of its own."""
    own = serving()
    for number in own.syncing:
        own.begin_transfer(number)
    assert own.pass_time(1000) == ([], [])
    for number in (0, 1):
        assert not own.end_transfer(number, is_synced=True)
    assert own.pass_time(5) == ([], []) and own.open == [0, 1]


def test_a_transfer_without_weights_leaves_an_engine_stale() -> None:
    """It has joined, or the learners have given up."""
    own = members()
    own.loaded(0)
    own.begin_transfer(0)
    assert not own.end_transfer(0, is_synced=False) and own.open == [] and own.stale == [0]
    own.begin_transfer(0)
    assert own.end_transfer(0, is_synced=True) and own.open == [0]


def test_an_engine_may_take_long_to_start_but_not_for_ever() -> None:
    """Nothing is heard of it meanwhile."""
    own = members()
    assert own.pass_time(99) == ([], [])
    assert own.pass_time(2) == ([], [0, 1])


def test_an_engine_that_leaves_samples_to_the_end_and_is_not_started_again() -> None:
    """The user wants its machine."""
    own = serving(3)
    assert own.leave(0) and own.open == own.syncing == own.lasting == [1, 2] and own.sampling == [0, 1, 2]
    own.died(0, "killed")
    assert own[0].state is State.RETIRED
    own.died(1, "killed")
    assert not own.leave(1) and own[1].state is State.RETIRED


def test_without_syncs_engines_serve_what_they_have_loaded() -> None:
    """An evaluation has no learners."""
    own = Members(1, max_restarts=1, patience_s=10, start_s=100)
    own.loaded(0)
    assert own.open == [0]
    own.died(0, "killed")
    own.restart(0)
    own.loaded(0)
    assert own.open == [0]
