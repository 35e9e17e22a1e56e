"""What rank 0 puts into a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mgrpo.config.load import from_values
from mgrpo.data.sampler import Sampler
from mgrpo.run.head import Head


class FakeController:
    """Takes prompts from the sampler."""

    prepared = None

    def __init__(self, sampler):
        self.sampler = sampler

    def prepare(self):
        self.prepared = self.sampler.take(4)

    def next_batch(self):
        self.prepared = None
        self.sampler.exclude({1})
        self.sampler.take(2)


@pytest.fixture
def head():
    """Without engines, data and threads."""
    head = object.__new__(Head)
    head.config = from_values({})
    head.sampler = Sampler(20, seed=1)
    head.controller = FakeController(head.sampler)
    head.writer = SimpleNamespace(num_lines=3)
    head.cursor = None
    return head


def test_a_state_taken_while_a_batch_is_under_way_is_the_one_before_it(head):
    """SIGTERM finds a batch half sampled: its prompts are drawn again."""
    before = head.state_dict()
    head.next_batch(1)
    assert head.state_dict() == before
    head.prepare(is_next=False)
    after = head.state_dict()
    assert after["sampler"]["excluded"] == [1]


def test_prompts_that_are_queued_ahead_are_handed_out_again(head):
    """The next batch lies in the engines already when a step is saved; the engines forget it."""
    head.next_batch(1)
    head.prepare()
    sampler = Sampler(20, seed=1)
    sampler.load_state_dict(head.state_dict()["sampler"])
    assert sampler.take(4) == head.controller.prepared
