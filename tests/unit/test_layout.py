"""Who holds what, against Megatron's own order of ranks."""

from __future__ import annotations

import re

import pytest

from mgrpo.layout import Coordinate, Layout
from mgrpo.parallel import backend

LAYOUTS = [
    Layout(world_size=1),
    Layout(world_size=8, tensor=2, pipeline=2, context=2),
    Layout(world_size=16, tensor=2, pipeline=2, context=2),
    Layout(world_size=24, tensor=2, pipeline=3, context=2, expert=4),
    Layout(world_size=16, pipeline=2, context=4, expert=8),
    Layout(world_size=12, tensor=3, expert=2),
    Layout(world_size=8, pipeline=4, expert=2),
]


def megatrons_groups(**sizes):
    """Megatron's groups of ranks, by the axis they lie along."""
    backend.install()
    from megatron.core.parallel_state import RankGenerator

    ranks = RankGenerator(order="tp-cp-ep-dp-pp", **sizes)
    return {axis: ranks.get_ranks(axis) for axis in sizes}


def neighbours(layout, *, fixed):
    """Ranks that agree on every coordinate of `fixed`, as sorted groups."""
    groups = {}
    for rank in range(layout.world_size):
        place = layout.coordinate(rank)
        groups.setdefault(tuple(getattr(place, axis) for axis in fixed), []).append(rank)
    return sorted(groups.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_coordinates_are_megatrons(layout):
    """A rank that thinks it is another would load the other's slice of the weights and train the other's packs."""
    dense = megatrons_groups(tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context)
    axes = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
    for token, axis in axes.items():
        others = [other for other in axes.values() if other != axis]
        assert neighbours(layout, fixed=others) == sorted(dense[token])
        for group in dense[token]:
            assert [getattr(layout.coordinate(rank), axis) for rank in group] == list(range(len(group)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_holders_of_a_slice_share_the_data_coordinate(layout):
    """Each receives its packs from another holder: one that is missing from the list waits for ever."""
    for data in range(layout.data):
        expected = [rank for rank in range(layout.world_size) if layout.coordinate(rank).data == data]
        assert layout.holders(data) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_where_megatron_puts_them(layout):
    """Experts have an order of ranks of their own: their data-parallel ranks are not those of the other weights."""
    experts = megatrons_groups(
        tp=layout.expert_tensor, ep=layout.expert, dp=layout.expert_data, pp=layout.pipeline, cp=1
    )
    for group in experts["ep"]:
        assert [layout.coordinate(rank).expert for rank in group] == list(range(layout.expert))
    for group in experts["dp"]:
        places = [layout.coordinate(rank) for rank in group]
        assert len(group) == layout.expert_data
        assert len({(place.expert, place.pipeline) for place in places}) == 1


def test_one_coordinate_by_hand():
    """Rank 13 of tensor 2, context 2, data 2, pipeline 2: 13 = 1 + 2 x 0 + 4 x 1 + 8 x 1."""
    layout = Layout(world_size=16, tensor=2, pipeline=2, context=2, expert=4)
    assert layout.coordinate(13) == Coordinate(tensor=1, context=0, data=1, pipeline=1, expert=1)


@pytest.mark.parametrize(
    ("layout", "num_layers", "expected"),
    [
        (Layout(world_size=1), 5, [[[0, 1, 2, 3, 4]]]),
        (Layout(world_size=2, pipeline=2), 6, [[[0, 1, 2]], [[3, 4, 5]]]),
        (Layout(world_size=2, pipeline=2, first_stage_layers=2), 6, [[[0, 1]], [[2, 3, 4, 5]]]),
        (Layout(world_size=2, pipeline=2, last_stage_layers=1), 4, [[[0, 1, 2]], [[3]]]),
        (Layout(world_size=2, pipeline=2, first_stage_layers=1, last_stage_layers=3), 4, [[[0]], [[1, 2, 3]]]),
        (
            Layout(world_size=4, pipeline=4, first_stage_layers=1, last_stage_layers=1),
            8,
            [[[0]], [[1, 2, 3]], [[4, 5, 6]], [[7]]],
        ),
        (Layout(world_size=3, pipeline=3, last_stage_layers=2), 8, [[[0, 1, 2]], [[3, 4, 5]], [[6, 7]]]),
        (Layout(world_size=2, pipeline=2, virtual_pipeline=2), 8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (Layout(world_size=3, pipeline=3, virtual_pipeline=2), 6, [[[0], [3]], [[1], [4]], [[2], [5]]]),
    ],
)
def test_every_layer_is_in_one_chunk(layout, num_layers, expected):
    """A layer that no stage holds is missing from the model, one that two hold is computed twice."""
    found = [
        [list(layout.chunk_layers(num_layers, stage, chunk)) for chunk in range(layout.virtual_pipeline)]
        for stage in range(layout.pipeline)
    ]
    assert found == expected
    # The order in which a micro-batch meets them.
    by_time = [found[stage][chunk] for chunk in range(layout.virtual_pipeline) for stage in range(layout.pipeline)]
    assert [layer for layers in by_time for layer in layers] == list(range(num_layers))
    assert not layout.problems()


@pytest.mark.parametrize("pipeline", [1, 2, 3, 4])
def test_chunks_cover_every_layer_whatever_the_cut(pipeline):
    """The same for all cuts of 24 layers that are legal."""
    ends = range(1, 6) if pipeline > 1 else ()
    for first in (None, *ends):
        for last in (None, *ends):
            given = [size for size in (first, last) if size is not None]
            middle = pipeline - len(given)
            rest = 24 - sum(given)
            if rest % middle if middle else rest:
                continue
            layout = Layout(world_size=pipeline, pipeline=pipeline, first_stage_layers=first, last_stage_layers=last)
            layers = [layer for stage in range(pipeline) for layer in layout.chunk_layers(24, stage)]
            assert layers == list(range(24))
            assert sum(layout.stage_sizes(24)) == 24
    for virtual in (2, 3, 4) if pipeline > 1 else ():
        layout = Layout(world_size=pipeline, pipeline=pipeline, virtual_pipeline=virtual)
        chunks = [layout.chunk_layers(24, stage, c) for stage in range(pipeline) for c in range(virtual)]
        assert sorted(layer for chunk in chunks for layer in chunk) == list(range(24 // (pipeline * virtual) * pipeline * virtual))  # fmt: skip


@pytest.mark.parametrize(
    ("pipeline", "virtual", "first", "last", "num_layers", "expected"),
    [
        (8, 4, 11, 11, 94, [2, *[3] * 30, 2]),  # Qwen3-235B-A22B
        (8, 3, 11, 11, 94, [3, *[4] * 22, 3]),
        (16, 8, 7, 7, 126, [0, *[1] * 126, 0]),  # Llama 3.1 405B: embedding and head are chunks of their own
        (2, 2, 3, 4, 7, [1, 2, 2, 2]),
    ],
)
def test_stages_with_fewer_layers_are_cut_into_chunks(pipeline, virtual, first, last, num_layers, expected):
    """The chunk that embeds and the one that ends in the head have what is left."""
    layout = Layout(
        world_size=pipeline,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        first_stage_layers=first,
        last_stage_layers=last,
    )
    assert layout.chunk_sizes(num_layers) == expected
    chunks = [layout.chunk_layers(num_layers, stage, chunk) for chunk in range(virtual) for stage in range(pipeline)]
    assert [layer for chunk in chunks for layer in chunk] == list(range(num_layers))
    assert sum(map(len, chunks[::pipeline])) == first and sum(map(len, chunks[pipeline - 1 :: pipeline])) == last


def test_sizes_that_follow_from_others():
    """Each is a divisor somewhere: of gradients, of experts, of micro-batches."""
    layout = Layout(world_size=32, tensor=2, pipeline=2, context=2, expert=4, zero_stage=3)
    assert (layout.data, layout.expert_tensor, layout.expert_data, layout.num_shards) == (4, 1, 4, 8)
    assert layout.micro_batches_multiple_of == 1
    assert Layout(world_size=8, tensor=2).expert_tensor == 2
    assert Layout(world_size=8, zero_stage=3, shard_size=4).num_shards == 4
    assert Layout(world_size=4, pipeline=4, virtual_pipeline=2).micro_batches_multiple_of == 4


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (Layout(world_size=1, tensor=0), "tensor_model_parallel_size=0 must be at least 1"),
        (Layout(world_size=0), "world_size=0 must be at least 1"),
        (
            Layout(world_size=6, tensor=2, context=2),
            "6 learner ranks cannot be split into tensor 2 x pipeline 1 x context 2 = 4; start a multiple of 4 ranks: "
            "--nproc-per-node 4",
        ),
        (Layout(world_size=1, sequence_parallel=True), "sequence_parallel=true needs tensor_model_parallel_size > 1"),
        (
            Layout(world_size=2, pipeline=2, first_stage_layers=0),
            "num_layers_in_first_pipeline_stage=0 must be at least 1",
        ),
        (
            Layout(world_size=1, last_stage_layers=3),
            "num_layers_in_last_pipeline_stage=3 needs pipeline_model_parallel_size > 1, got 1; use more stages, or leave it out",
        ),
        (
            Layout(world_size=1, virtual_pipeline=2),
            "virtual_pipeline_model_parallel_size=2 interleaves the stages of a pipeline; it needs "
            "pipeline_model_parallel_size > 1",
        ),
        (
            Layout(world_size=12, pipeline=2, expert=4),
            "expert_model_parallel_size=4 does not divide the 6 ranks of a pipeline stage; choose from {1, 2, 3, 6}",
        ),
        (
            Layout(world_size=4, expert=4, zero_stage=3),
            "zero_stage=3 with expert_model_parallel_size=4 leaves no two ranks with the same experts, for which "
            "Megatron-FSDP computes wrong gradients; use zero_stage=1, expert_model_parallel_size=2, or twice as many ranks",
        ),
        (Layout(world_size=4, shard_size=2), "fsdp_shard_degree=2 needs zero_stage=3, got 1"),
        (
            Layout(world_size=12, tensor=2, zero_stage=3, shard_size=4),
            "fsdp_shard_degree=4 must divide the 6 data- and context-parallel ranks and be at least 2; choose from "
            "{2, 3, 6}",
        ),
        (
            Layout(world_size=1, zero_stage=3, shard_size=4),
            "fsdp_shard_degree=4 must divide the 1 data- and context-parallel ranks and be at least 2; leave it out",
        ),
        (
            Layout(world_size=8, expert=2, zero_stage=3, shard_size=4),
            "fsdp_shard_degree=4 cannot be combined with expert_model_parallel_size=2; leave it out",
        ),
    ],
)
def test_an_impossible_layout_says_why(layout, sentence):
    """Each of these is an assertion deep in Megatron, or silently wrong gradients."""
    assert layout.problems() == [sentence]


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        Layout(world_size=8, zero_stage=2, expert=4),
        Layout(world_size=8, zero_stage=3, expert=2, shard_size=8),
        Layout(world_size=8, zero_stage=3, context=2, shard_size=2),
        Layout(world_size=4, zero_stage=1, expert=4),
        Layout(world_size=4, tensor=4, sequence_parallel=True, expert=4),
    ],
)
def test_a_possible_layout_has_no_problems(layout):
    """A rule that is too strict closes an axis."""
    assert layout.problems() == []


def test_the_sizes_offered_are_legal():
    """Advice that leads to the next error is none."""
    for layout, make in (
        (Layout(world_size=12, expert=5), lambda size: Layout(world_size=12, expert=size)),
        (
            Layout(world_size=12, zero_stage=3, shard_size=5),
            lambda size: Layout(world_size=12, zero_stage=3, shard_size=size),
        ),
    ):
        (sentence,) = layout.problems()
        offered = [int(size) for size in re.search(r"{(.*)}", sentence)[1].split(", ")]
        assert len(offered) > 3
        assert all(make(size).problems() == [] for size in offered)


@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        (Layout(world_size=1, zero_stage=3), 1),
        (Layout(world_size=2, tensor=2, zero_stage=2), 1),
        (Layout(world_size=2, zero_stage=3), 3),
        (Layout(world_size=2, context=2, zero_stage=2), 2),
        (Layout(world_size=1, zero_stage=0), 0),
    ],
)
def test_who_shares_with_nobody_shards_nothing(layout, stage):
    """Megatron-FSDP's gradients are wrong in a group of one, and Adam hides it."""
    assert layout.sharding == stage
