"""Weight syncs that engines take part in: what the planner says beside the plan that a run makes."""

from __future__ import annotations

import dataclasses

import pytest

from mgrpo.layout import InferLayout, Layout
from mgrpo.planner.engines.transfers import direct_engines, sync_seconds
from mgrpo.planner.hardware import GPUS, Hardware
from mgrpo.sync.plan import plan
from tests.unit.sync.ends import shipped

LAYOUTS = {
    "235B on 256": (
        "235b_a22b_32x8",
        Layout(world_size=256, tensor=4, pipeline=8, expert=16, first_stage_layers=11, last_stage_layers=11),
        InferLayout(tensor=8, expert_parallel=True),
    ),
    "32B on 128": ("32b_16x8", Layout(world_size=128, tensor=8, pipeline=4), InferLayout(tensor=4)),
    "32B on 1,024": ("32b_16x8", Layout(world_size=1024, tensor=4, pipeline=2), InferLayout(tensor=4)),
    "7B on 6": ("7b_8gpu", Layout(world_size=6, tensor=2), InferLayout()),
}


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("engines", [8, 33, 256, 1024])
def test_as_many_engines_are_served_by_learners_as_in_the_runs_plan(case, engines):
    """Memory and time of the sync follow from it."""
    name, train, infer = LAYOUTS[case]
    infer = dataclasses.replace(infer, engines=engines)
    trees = plan(shipped(name)[0], train, infer).sources.trees(engines)
    assert direct_engines(train, infer) == (engines if trees is None else trees)


def test_engines_that_send_on_take_the_time_of_two_copies_and_of_the_buckets_on_the_way():
    """By hand: 64 learners of one copy, 56 engines in 7 trees of 8: a learner would send 56 engines' parts itself."""
    shape, *_ = shipped("32b_16x8")
    hardware = Hardware(gpu=GPUS["H100"], nodes=64)
    hardware = dataclasses.replace(hardware, assumed=dataclasses.replace(hardware.assumed, piece_us=0.0))
    rate, size, bucket = hardware.link_bytes_s(512), 64e9, 1 << 28
    infer = InferLayout(engines=56, tensor=8)

    def seconds(direct: int | None) -> float:
        found = sync_seconds(
            size, shape, infer, learners=64, cuts=1, hardware=hardware, direct=direct, bucket_bytes=bucket
        )
        return found * rate

    assert seconds(None) == pytest.approx(56e9)
    # Places 0 to 7 of a binary tree: the last is three floors down.
    assert seconds(7) == pytest.approx(2 * 8e9 + 3 * 2 * bucket)
