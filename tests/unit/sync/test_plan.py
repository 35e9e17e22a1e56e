"""The reshard plan: complete, minimal, balanced, the same everywhere."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.adapters import LoraShape, adapter_tensors, engine_adapter_boxes, lora_a, lora_b
from mgrpo.models.family import shape_of
from mgrpo.models.placement.box_table import HeldBoxes
from mgrpo.models.placement.boxes import Box
from mgrpo.models.table import engine_boxes, hf_tensors
from mgrpo.sync.plan import ReshardPlan, plan, reshard
from mgrpo.sync.sending.rounds import buckets, messages, rounds
from tests.unit.models.test_table import MODELS
from tests.unit.sync.ends import SHIPPED, sharded_holdings, shipped
from tests.unit.sync.plan_oracle import Incoming

PAIRS = [
    (Layout(world_size=1), InferLayout()),
    (Layout(world_size=2, tensor=2), InferLayout()),
    (Layout(world_size=2, tensor=2), InferLayout(tensor=4)),
    (Layout(world_size=8, tensor=4, pipeline=2), InferLayout(engines=3, tensor=2)),
    (Layout(world_size=4), InferLayout(engines=2)),
    (Layout(world_size=4, tensor=2, expert=2), InferLayout(engines=2, tensor=2, expert_parallel=True)),
    (Layout(world_size=2, pipeline=2), InferLayout(tensor=4, expert_parallel=True)),
    (Layout(world_size=2, pipeline=2), InferLayout(data=3, expert_parallel=True)),
    (Layout(world_size=4, tensor=2, expert=2), InferLayout(engines=2, tensor=2, data=2, expert_parallel=True)),
]


APART = LoraShape(rank=3, alpha=6, is_merged=False)


@pytest.mark.parametrize(
    "lora", [None, LoraShape(rank=3, alpha=6), APART, replace(APART, targets=("k_proj", "o_proj"))], ids=str
)
@pytest.mark.parametrize(("train", "infer"), PAIRS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_worker_receives_every_element_once(name, train, infer, lora):
    """A hole leaves old weights in the engine without an error; a double is wasted bandwidth."""
    model = shape_of(MODELS[name])
    made = plan(model, train, infer, itemsize=2, lora=lora)
    is_apart = lora is not None and not lora.is_merged
    wanted = engine_adapter_boxes(model, infer, lora) if is_apart else engine_boxes(model, infer)
    shapes = adapter_tensors(model, lora) if is_apart else hf_tensors(model)
    received = received_by(made)
    for worker in range(infer.engines * infer.workers):
        got = {tensor: np.zeros(shape, dtype=int) for tensor, shape in shapes.items()}
        for box in itertools.chain(*received[worker].values()):
            got[box.name][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] += 1
        for box in wanted[worker % infer.workers]:
            region = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            assert (got[box.name][region] == 1).all()
            got[box.name][region] = 0
        assert not any(rest.any() for rest in got.values()), "something was sent that the worker does not hold"
    assert made.bytes_moved == made.lower_bound
    assert received == received_by(plan(model, train, infer, itemsize=2, lora=lora))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_workers_of_an_engine_can_add_an_adapter_to_their_own_weights(name, workers):
    """Row B A of a worker's slice of W needs the same rows of B and columns of A; another worker's are of no use to it."""
    model, infer = shape_of(MODELS[name]), InferLayout(tensor=workers)
    random = np.random.default_rng(0)
    values = {name: random.normal(size=shape) for name, shape in adapter_tensors(model, APART).items()}
    for weights, adapters in zip(engine_boxes(model, infer), engine_adapter_boxes(model, infer, APART), strict=True):
        own = {box: values[box.name][box.within(Box(box.name, (0, 0), values[box.name].shape))] for box in adapters}
        assert len(own) == len(adapters)
        for box in (box for box in weights if APART.adapts(box.name)):
            a, b = lora_a(box.name), lora_b(box.name)
            expected = (values[b] @ values[a])[box.within(Box(box.name, (0, 0), hf_tensors(model)[box.name]))]
            # A worker has the rows of several sections of one matrix, such as queries, keys and values.
            columns = Box(a, (0, box.start[1]), (APART.rank, box.shape[1]))
            rows = Box(b, (box.start[0], 0), (box.shape[0], APART.rank))
            np.testing.assert_allclose(own[rows] @ own[columns], expected, atol=1e-12)


def received_by(made: ReshardPlan) -> list[Incoming]:
    """For each worker of all engines that ranks send to, the boxes from each rank."""
    found: dict[tuple[int, int], Incoming] = {}
    for engine, worker, rank, boxes in made.transfers:
        found.setdefault((engine, worker), {})[rank] = boxes
    assert [*found] == [*itertools.product(range(made.sources.engines), range(len(made.workers)))]
    return [*found.values()]


def sent(incoming: list[Incoming], num_sources: int) -> list[int]:
    """Elements that each training rank sends."""
    return [sum(box.size for boxes in incoming for box in boxes.get(rank, ())) for rank in range(num_sources)]


def balance(incoming: list[Incoming], num_sources: int) -> float:
    """The elements that the busiest training rank sends, over the mean."""
    loads = sent(incoming, num_sources)
    return max(loads) * num_sources / sum(loads)


def num_pairs(incoming: list[Incoming]) -> int:
    return sum(map(len, incoming))


@pytest.mark.parametrize(("name", "pairs"), SHIPPED.items())
def test_shipped_configurations_have_few_pairs_with_an_even_load(name, pairs):
    """Every pair costs a connection and buffers: 32B on 128 GPUs had 1257 pairs when each box went its own way."""
    model, train, infer = shipped(name)
    made = plan(model, train, infer)
    assert num_pairs(received_by(made)) == pairs
    assert balance(received_by(made), train.world_size) < 1.01
    assert made.bytes_moved == made.lower_bound


@pytest.mark.parametrize(
    ("layout", "pairs"),
    [({"zero_stage": 2, "tensor": 2}, 32), ({"zero_stage": 3}, 64), ({"zero_stage": 3, "shard_size": 2}, 16)],
)
def test_sharded_weights_come_from_every_shard_and_from_one_of_its_replicas(layout, pairs):
    """Under ZeRO-2 and 3 no rank can send for another: the pairs are many, but nothing is sent twice."""
    model, train, infer = shape_of(MODELS["qwen3"]), Layout(world_size=8, **layout), InferLayout(engines=4, tensor=2)
    made = plan(model, train, infer, holdings=HeldBoxes.of(sharded_holdings(model, train)))
    assert num_pairs(received_by(made)) == pairs
    assert balance(received_by(made), train.world_size) < 1.1
    assert made.bytes_moved == made.lower_bound


def test_a_worker_has_one_source_where_there_are_as_many_replicas():
    """Each replica sends the whole model to one worker, and all of them send at the same time."""
    made = plan(shape_of(MODELS["qwen3"]), Layout(world_size=4), InferLayout(engines=4))
    assert [list(incoming) for incoming in received_by(made)] == [[0], [1], [2], [3]]


def test_replicas_share_the_load():
    """One data-parallel replica that sends everything is the bottleneck of every peer."""
    model = shape_of(MODELS["qwen3"])
    made = plan(model, Layout(world_size=4), InferLayout(), itemsize=2)
    loads = sent(received_by(made), 4)
    assert max(loads) - min(loads) <= max(box.size for boxes in engine_boxes(model, InferLayout()) for box in boxes)


def test_a_missing_shard_is_named():
    """Training ranks that do not hold a row cannot send it."""
    with pytest.raises(ValueError, match=r"w.*worker 0 needs 8 elements, the training ranks hold 6"):
        held = HeldBoxes.of([[Box("w", (0, 0), (3, 2))]])
        reshard(held, [held.tensors.rows([Box("w", (0, 0), (4, 2))])], engines=1, itemsize=4)


def test_buckets_are_bounded_and_complete():
    """A bucket larger than its bound is the memory peak the bound is there to prevent."""
    boxes = [
        Box("a", (0, 0), (100, 7)),
        Box("b", (5,), (3,)),
        Box("c", (0, 2), (2, 900)),
        Box("an expert", (3, 0, 5), (1, 64, 20)),
    ]
    cut = buckets(boxes, itemsize=4, bucket_bytes=400)
    assert all(sum(box.size for box in bucket) <= 100 for bucket in cut if bucket[0].name != "c")
    assert sum(box.size for bucket in cut for box in bucket) == sum(box.size for box in boxes)
    assert cut == buckets(boxes, itemsize=4, bucket_bytes=400)


def test_a_round_is_bounded_however_many_ranks_send():
    """A worker of a sharded model receives from all ranks at once, beside a model that fills its memory."""
    incoming = {source: [Box(f"{source}", (0, 0), (100 + source, 7))] for source in (5, 2, 9)}
    for limit in (None, 40):
        queues = {
            source: messages(boxes, 3, itemsize=4, bucket_bytes=1200, limit=limit if source == 9 else None)
            for source, boxes in incoming.items()
        }
        cut = rounds(queues)
        assert all(sum(box.size for boxes in each.values() for box in boxes) <= 300 for each in cut)
        assert max(sum(box.size for box in each.get(9, ())) for each in cut) <= (limit or 400) // 4
        assert list(cut[0]) == [5, 2, 9], "all ranks at the same time"
        for source, boxes in incoming.items():
            assert sum(box.size for each in cut for box in each.get(source, ())) == boxes[0].size
