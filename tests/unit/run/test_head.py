"""What rank 0 puts into a checkpoint."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from mgrpo.data.sampler import Sampler
from mgrpo.run.head import Head, random_states, restore_random


class FakeController:
    """Takes prompts from the sampler, and scores with functions that draw random numbers."""

    prepared = None

    def __init__(self, sampler):
        self.sampler = sampler

    def prepare(self):
        self.prepared = self.sampler.take(4)

    def next_batch(self):
        self.prepared = None
        self.sampler.exclude({1})
        self.sampler.take(2)
        return random.random(), np.random.rand()


@pytest.fixture
def head():
    """Without engines, data and threads."""
    before = random_states()
    head = object.__new__(Head)
    head.sampler = Sampler(20, seed=1)
    head.controller = FakeController(head.sampler)
    head.writer = SimpleNamespace(num_lines=3)
    head.cursor = head.random = None
    yield head
    restore_random(before)


def test_a_state_taken_while_a_batch_is_under_way_is_the_one_before_it(head):
    """SIGTERM finds a batch half sampled: its prompts and the random numbers of its rewards are drawn again."""
    before = head.state_dict()
    head.next_batch()
    assert head.state_dict() == before
    head.prepare(is_next=False)
    after = head.state_dict()
    assert after["random"] != before["random"]
    assert after["sampler"]["excluded"] == [1]


def test_prompts_that_are_queued_ahead_are_handed_out_again(head):
    """The next batch lies in the engines already when a step is saved; the engines forget it."""
    head.next_batch()
    head.prepare()
    sampler = Sampler(20, seed=1)
    sampler.load_state_dict(head.state_dict()["sampler"])
    assert sampler.take(4) == head.controller.prepared


def test_random_states_survive_json(head):
    """A normal variate may be kept back between two draws; without it the stream is off by one."""
    import json

    random.seed(3)
    np.random.seed(3)
    random.gauss(0, 1), np.random.randn()
    states = json.loads(json.dumps(random_states()))
    expected = [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()]
    random.seed(4)
    np.random.seed(4)
    restore_random(states)
    assert [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()] == expected
