"""Who sends what, against the plain plan of `plan_oracle`, and at sizes that only tables can hold."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.placement.box_table import COLUMNS, HeldBoxes, Tensors, packed, unpacked
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import engine_boxes, training_boxes
from mgrpo.run.train.engine_weights import EngineWeights
from mgrpo.sync.channel import Sender
from mgrpo.sync.plan import plan
from mgrpo.sync.sending.layout_tables import training_holdings
from mgrpo.sync.sending.seating import Seating
from mgrpo.sync.sending.senders import MOST_GROUPS
from mgrpo.sync.vllm_plugin.receiver import Receiver
from tests.unit.models.test_table import MODELS
from tests.unit.sync import plan_oracle
from tests.unit.sync.ends import sharded_holdings, shipped
from tests.unit.sync.test_plan import num_pairs, received_by, sent


def any_layouts(chance: random.Random) -> tuple[str, Layout, InferLayout]:
    """A model with a training and an inference layout that it can have."""
    name = chance.choice([*MODELS])
    has_experts = shape_of(MODELS[name]).experts is not None
    tensor, pipeline, copies = chance.choice((1, 2)), chance.choice((1, 2)), chance.choice((1, 2, 3, 4))
    expert = chance.choice((1, 2)) if has_experts and copies * tensor % 2 == 0 else 1
    sharded: dict[str, int] = {"zero_stage": 3} if chance.random() < 0.3 else {}
    train = Layout(world_size=tensor * pipeline * copies, tensor=tensor, pipeline=pipeline, expert=expert, **sharded)
    is_shared_out = has_experts and chance.random() < 0.5
    return name, train, InferLayout(engines=chance.randint(1, 12), tensor=2, expert_parallel=is_shared_out)


@pytest.mark.parametrize("seed", range(40))
def test_the_busiest_rank_sends_no_more_than_in_the_plain_plan(seed):
    """One rank that sends more than the others is waited for by every engine."""
    name, train, infer = any_layouts(random.Random(seed))
    model = shape_of(MODELS[name])
    boxes = sharded_holdings(model, train) if train.zero_stage > 1 else training_boxes(model, train)
    # Four bytes: units are elements.
    made = plan(model, train, infer, itemsize=4, holdings=HeldBoxes.of(boxes))
    received, workers = received_by(made), engine_boxes(model, infer)
    plain = plan_oracle.reshard(boxes, workers * made.sources.engines)
    largest = max(box.size for incoming in plain for own in incoming.values() for box in own)
    assert max(sent(received, train.world_size)) <= max(sent(plain, train.world_size)) + largest
    assert made.sources.most_groups <= MOST_GROUPS
    # The same slices, wherever they come from.
    for own, other in zip(received, plain, strict=True):
        assert {box for each in own.values() for box in each} == {box for each in other.values() for box in each}


@pytest.mark.parametrize(("name", "engines"), [("7b_8gpu", 5), ("32b_16x8", 5), ("30b_a3b_4x8", 5)])
def test_models_of_size_need_no_more_pairs_than_in_the_plain_plan(name, engines):
    """Norms are held by more ranks than matrices: a connection for them alone is one too many."""
    model, train, infer = shipped(name)
    made = plan(model, train, infer := replace(infer, engines=engines))
    plain = plan_oracle.reshard(training_boxes(model, train), engine_boxes(model, infer) * engines)
    assert num_pairs(received_by(made)) <= num_pairs(plain)


@pytest.mark.parametrize("engines", [512, 509, 1024])
def test_a_rank_sends_to_few_engines_however_many_there_are(engines):
    """Each is a communicator on a training rank, and a turn in its sync."""
    model, _, infer = shipped("32b_16x8")
    made = plan(model, Layout(world_size=1024, tensor=4, pipeline=2), replace(infer, engines=engines))
    assert made.sources.most_groups <= MOST_GROUPS
    assert made.sources.engines >= min(engines, 384)
    loads = [sum(len(places) for own in made.outgoing(rank).values() for places in own.values()) for rank in (0, 1023)]
    assert min(loads) > 0
    assert made.bytes_moved == made.lower_bound == engines * made.lower_bound // made.engines


def test_ranks_without_replicas_send_to_as_many_engines_as_they_can():
    """The others get their weights from these engines."""
    model, train, infer = shipped("235b_a22b_32x8")
    made = plan(model, replace(train, world_size=64, expert=8, context=1), replace(infer, engines=40))
    assert (made.sources.engines, made.sources.most_groups) == (MOST_GROUPS - 1, MOST_GROUPS - 1)
    for engine in (3, 10, 38):
        for own, other in zip(made.incoming(3), made.incoming(engine), strict=True):
            assert own.keys() == other.keys()
            assert all(np.array_equal(own[rank], other[rank]) for rank in own)


def test_the_ranks_that_prove_share_the_slices_of_an_engine():
    """A slice that nobody proves may be wrong in every engine; one that two ranks prove is wrong in none and said to be."""
    model, train, infer = shape_of(MODELS["qwen3_moe"]), Layout(world_size=8, tensor=2, expert=2), InferLayout(tensor=2)
    made = plan(model, train, infer)
    proofs = [made.proof(rank) for rank in range(train.world_size)]
    assert all(proofs)
    proven = [places for proof in proofs for places in proof.values()]
    assert np.array_equal(np.sort(np.concatenate(proven)), np.arange(len(made.slices)))
    held = training_boxes(model, train)
    for rank, proof in enumerate(proofs):
        for worker, places in proof.items():
            assert (places >= made.workers[worker].start).all() and (places < made.workers[worker].stop).all()
            for box in made.boxes(places):
                assert any(box.name == own.name and own.intersect(box) == box for own in held[rank])


@pytest.mark.parametrize("name", MODELS)
def test_layouts_are_held_as_the_table_of_every_rank_says(name):
    """Replicas share a table: a rank in the wrong one would send what it does not hold."""
    model = shape_of(MODELS[name])
    layout = Layout(world_size=8, tensor=2, pipeline=2, expert=2 if model.experts else 1)
    held = training_holdings(model, layout)
    assert [held.boxes(rank) for rank in range(8)] == training_boxes(model, layout)
    other = HeldBoxes.of(training_boxes(model, layout))
    assert list(map(list, held.ranks)) == other.ranks
    for rows, again in zip(held.tables, other.tables, strict=True):
        assert np.array_equal(rows, held.tensors.renumbered([again], other.tensors)[0])


def test_tables_come_out_as_they_went_in():
    """Both ends must cut the same slices."""
    chance = np.random.default_rng(0)
    for table in (chance.integers(-5, 1 << 29, (50, COLUMNS)), np.zeros((0, 3), int), np.arange(12).reshape(4, 3)):
        assert np.array_equal(unpacked(packed(table), table.shape[1]), table)
    boxes = [Box("a", (0, 3), (5, 4)), Box("b", (7,), (1,)), Box("c", (1, 0, 2), (1, 9, 9)), Box("a", (5, 0), (1, 7))]
    tensors = Tensors({"c": (3, 9, 11), "b": (8,), "a": (6, 7)})
    assert tensors.boxes(tensors.rows(boxes)) == boxes


def planning_sender(model: ModelShape, train: Layout, infer: InferLayout) -> Sender:
    """Rank 0, without weights."""
    return Sender(
        [(Box("x", (0,), (1,)), torch.zeros(1))],
        holdings=training_holdings(model, train),
        model=model,
        train_layout=train,
        infer_layout=infer,
        rank=0,
        dtype=torch.bfloat16,
        store=None,
        host="127.0.0.1",
        port=1,
        bucket_bytes=1 << 28,
        timeout_s=1,
    )


def test_an_invitation_to_a_large_mixture_is_small():
    """Rank 0 makes one for every engine; as boxes this one had 22 MB."""
    model, train, infer = shipped("235b_a22b_32x8")
    sender = planning_sender(model, train, infer)
    invitation = sender.invitation(3)
    assert (
        sum(len(unpacked(table, COLUMNS)) for table in invitation["slices"]) * infer.engines == sender.plan.num_slices
    )
    assert len(json.dumps(invitation)) < 250_000


def test_both_ends_of_a_tree_cut_alike():
    """Engines of one tree would get other slices of a kind from a rank, or get them in another order, if they joined by themselves."""
    train = Layout(world_size=256, tensor=4, pipeline=8, expert=16, first_stage_layers=11, last_stage_layers=11)
    infer = InferLayout(engines=1024, tensor=8, expert_parallel=True)
    sender = planning_sender(shipped("235b_a22b_32x8")[0], train, infer)
    sources = sender.plan.sources
    assert sources.blocks == 2 and sources.engines == 14, "engines of both blocks, and of several places in them"
    weights = object.__new__(EngineWeights)
    weights.sender, weights.seating = sender, Seating(sources.trees(1024))
    weights.seating.arrange(dict.fromkeys(range(1024), 0))
    for apart in (None, "tree"):
        stale = dict.fromkeys((3, 17, 18, 31, 300, 1023), 1)
        weights.seating.arrange(stale, apart=apart)
        cuts: dict[int, Any] = {}
        for number in stale:
            joined: list[Any] = []

            def join(invitation: Any, joined: list[Any] = joined) -> Future[None]:
                joined.append(invitation)
                return Future()

            weights._invite(number, SimpleNamespace(join=join))
            cuts[number] = [incoming(worker, joined[0]) for worker in range(8)]
        edges = [(seat.upstream[0], below) for below in stale if (seat := weights.seating.seats[below]).upstream]
        assert len(edges) == (5 if apart else 2)
        for above, below in edges:
            assert cuts[above] == cuts[below], f"engine {above} sends to {below}"
        for first in weights.seating.heads().keys() & stale:
            planned = sender.plan.incoming(first)
            learners = sender.plan.learners(first)
            for worker, found in enumerate(cuts[first]):
                own = {learners.index(rank): sender.plan.boxes(places) for rank, places in planned[worker].items()}
                assert dict(found) == own, "learners send to it what it expects"


def incoming(worker: int, invitation: dict[str, Any]) -> list[tuple[int, list[Box]]]:
    """What an engine's worker cuts into messages, by source."""
    receiver = object.__new__(Receiver)
    receiver.worker = worker
    receiver.model, receiver.lora = ModelShape.from_dict(invitation["model"]), None
    receiver.live = SimpleNamespace(dtype=torch.bfloat16)
    (stage,) = receiver._incoming(invitation)
    return [*stage.items()]
