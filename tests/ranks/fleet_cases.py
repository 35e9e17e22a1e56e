"""What the ranks of a test of the weight sync with engines that fail execute. The engines are threads with real receivers."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.cases import host_group, make_sharded_policy
from tests.scripted_engine import ScriptedEngine


class ReceivingEngine(ScriptedEngine):
    """Takes over the weights that learners send."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        from mgrpo.layout import InferLayout
        from mgrpo.models.table import engine_boxes
        from mgrpo.processes.background import Background

        self.thread = Background("engine")
        (boxes,) = engine_boxes(shape, InferLayout())
        self.live = [(box, torch.zeros(box.shape)) for box in boxes]
        self.receiver: Any = None
        self.lasts: int | None = None
        """Messages that arrive before it fails."""

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        from mgrpo.sync.vllm_plugin.receiver import Receiver, joined

        def join() -> None:
            make = partial(Receiver, self.live, worker=0, invitation=invitation)
            self.receiver = joined(self.receiver, invitation, make)

        return Future() if self.hangs == "join" else self.thread.submit(join)

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        def receive() -> None:
            if self.lasts is not None:
                self.receiver._receive = partial(_failing, self.receiver._receive, self.lasts)
            if not self.receiver.receive(version):
                return
            self.version = version
            if check:
                self.receiver.report_digests(version)

        if self.hangs == "receive_weights":
            return Future()
        if self.fails == "receive_weights":
            self.receiver.close()
            return self._future("receive_weights")
        return self.thread.submit(receive)


def _failing(receive: Any, lasts: int, version: int, arrived: Any) -> None:
    """What a receiver does that breaks off its transfers."""

    def tell(count: int) -> None:
        if count > lasts:
            raise ValueError("it breaks off")
        type(arrived).tell(arrived, count)

    arrived.tell = tell
    receive(version, arrived)
    raise AssertionError(f"no more than {lasts} messages have arrived")


def sync_with_engines_that_fail(
    model_dir: str, how: dict[str, str], transport: str, layout: dict[str, Any]
) -> dict[str, Any]:
    """Three syncs with two engines, of which the first fails in the second, and one while the learners wait for rank 0.

    Args:
        how: "fails" or "hangs", and the call.
    Returns:
        After each sync the generations of the engines that this rank sends to; on rank 0 also the version that each engine has.
    """
    from unittest import mock

    from mgrpo.sync import shared

    # Seemingly on another machine.
    connect = shared.connect if transport == "shared memory" else lambda *args, **kwargs: None
    # Many rounds: an engine that hangs must not keep the others from theirs.
    with mock.patch.multiple(shared, connect=connect, BUCKET_BYTES=1 << 12):
        return _sync(model_dir, how, layout)


def sync_through_engines(model_dir: str, how: str, transport: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Five syncs with five engines below the first ones; in the second the first engine fails, in the fourth the second.

    Args:
        how: the engine "fails", before it receives anything; "hangs": the second one does, in the middle of a tree; "parts": no engine
            reaches another one; a number: it fails when so many of the messages have arrived that it sends on.
    Returns:
        After each sync the engines that this rank sends to; on rank 0 also the version that each engine has, and its generation.
    """
    from unittest import mock

    from mgrpo.sync import channel, shared
    from mgrpo.sync.sending import senders
    from mgrpo.sync.vllm_plugin import receiver

    connect = shared.connect if transport == "shared memory" else lambda *args, **kwargs: None
    found: list[Any] = []
    patches = [
        mock.patch.object(shared, "connect", connect),
        mock.patch.multiple(senders, MOST_GROUPS=2, ALL_DIRECT=0),
        *(mock.patch.object(module, "BUCKET_BYTES", 1 << 12) for module in (channel, receiver, shared)),
    ]
    if how == "parts":
        patches.append(mock.patch.object(receiver.Receiver, "_between", side_effect=RuntimeError("no way")))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        # What fails is seen at once; an engine that hangs costs all of this.
        timeout_s = 12 if how == "hangs" else 60
        lead, fleet, weights = _run(model_dir, layout, engines=5, timeout_s=timeout_s)

        def sync(version: int, failing: int | None) -> None:
            if fleet and failing is not None:
                if how in ("fails", "hangs"):
                    setattr(fleet.engines[failing], how if failing else "fails", "receive_weights")
                elif how != "parts":
                    fleet.engines[failing].lasts = int(how)
            before = lead.call(lambda: [*fleet.engines])
            weights.send(version, step=version, check=version != 2)
            versions = lead.call(lambda: [engine.version for engine in before])
            generations = lead.call(lambda: [member.generation for member in fleet.members.all])
            found.append((sorted(weights.heads), versions, generations, len(weights.sender.generations)))
            lead.run(lambda: _wait_for(fleet, 5, "syncing"))

        weights.connect()
        for version, failing in enumerate((None, 0, None, 1, None), start=1):
            sync(version, failing)
        lead.close()
    return {
        "found": found,
        "weights": digests(fleet) if fleet else None,
        "bytes": weights.bytes_moved,
        "plan": weights.plan.lower_bound,
    }


def sync_with_engines_that_are_killed(
    model_dir: str, seed: int, transport: str, layout: dict[str, Any]
) -> dict[str, Any]:
    """Four syncs with six engines in processes of their own below the first ones: in each but the first one or two are killed.

    Returns:
        On rank 0, for each sync the engines that were to be killed, the version that each engine has after it, and what was held by
        those that have it.
    """
    from unittest import mock

    from mgrpo.sync import channel, shared
    from mgrpo.sync.sending import senders
    from tests.ranks.engine_process import BUCKET_BYTES, Forks, ProcessEngine

    chance = random.Random(seed)
    found: list[Any] = []
    with (
        contextlib.ExitStack() as stack,
        mock.patch.object(channel, "BUCKET_BYTES", BUCKET_BYTES),
        mock.patch.object(shared, "BUCKET_BYTES", BUCKET_BYTES),
        mock.patch.multiple(senders, MOST_GROUPS=2, ALL_DIRECT=0),
    ):
        forks = Forks(shares_memory=transport == "shared memory") if dist.get_rank() == 0 else None
        if forks:
            stack.callback(forks.close)
        lead, fleet, weights = _run(model_dir, layout, engines=6, timeout_s=30, make=partial(ProcessEngine, forks))
        lead.run(lambda: fleet.wait_ready())
        weights.connect()
        for version in range(1, 5):
            doomed = chance.sample(range(6), chance.choice((1, 2)) if version > 1 else 0)
            moments = [chance.choice((0, 1, 3, 10, 20)) for _ in doomed]
            if fleet:
                before = [*fleet.engines]
                for engine, moment in zip(doomed, moments, strict=True):
                    before[engine].lasts = moment
            weights.send(version, step=version, check=True)
            if fleet:
                well = [engine for number, engine in enumerate(before) if number not in doomed]
                found.append((doomed, [engine.version for engine in before], {engine.total() for engine in well}))
            lead.run(lambda: _wait_for(fleet, 6, "syncing"))
        lead.close()
    return {"found": found}


def sync_with_an_engine_that_fails_while_it_joins(
    model_dir: str, moment: str, engines: int, layout: dict[str, Any]
) -> tuple[str, list[int] | None]:
    """The error of the first sync, "" for none, and on rank 0 the versions that the engines have.

    Args:
        moment: "before" the engine meets a learner, or "after" the learners have come, which then wait for it for ten minutes.
    """
    lead, fleet, weights = _run(model_dir, layout, engines=engines, timeout_s=600)

    def join(invitation: Mapping[str, Any]) -> Future[None]:
        def fail() -> None:
            if moment == "after":
                store = connect_store(invitation["host"], invitation["port"], 60)
                keys = [f"{group_name(0, 0)}/here/{place}" for place in range(len(invitation["learners"]))]
                store.wait(keys)
            raise ValueError("engine and plan differ in 3 tensors")

        return fleet.engines[0].thread.submit(fail)

    from mgrpo.sync.channel import group_name
    from mgrpo.sync.group import connect_store

    if fleet:
        fleet.engines[0].join = join
    error = ""
    try:
        weights.connect()
        weights.send(1, step=1)
    except RuntimeError as err:
        error = str(err)
    versions = lead.call(lambda: [engine.version for engine in fleet.engines])
    lead.close()
    return error, versions


def _wait_for(fleet: Any, count: int, kind: str) -> None:
    deadline = time.monotonic() + 60
    while len(getattr(fleet.members, kind)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _run(
    model_dir: str,
    layout: dict[str, Any],
    *,
    engines: int,
    timeout_s: int = 3,
    make: Callable[[Any], ScriptedEngine] = ReceivingEngine,
) -> tuple[Any, Any, Any]:
    """Lead, on rank 0 the fleet, and weights."""
    from mgrpo.config.schema import Engine as EngineSettings
    from mgrpo.rollout.engines.fleet import Fleet
    from mgrpo.rollout.engines.roster import Roster
    from mgrpo.run.ranks.lead import Lead
    from mgrpo.run.train.engine_weights import EngineWeights

    settings = dataclasses.replace(
        EngineSettings(), weight_sync_timeout=timeout_s, vllm_num_engines=engines, weight_sync_bucket_mb=1
    )
    policy = make_sharded_policy(model_dir, layout)
    lead, fleet = Lead(), None
    if dist.get_rank() == 0:
        roster = Roster(
            [make(policy.shape) for _ in range(engines)],
            settings,
            start=lambda number: make(policy.shape),
            max_restarts=5,
        )
        fleet = Fleet(roster, seed=1)
    weights = EngineWeights(
        policy,
        shape=policy.shape,
        layout=policy.layout,
        settings=settings,
        lead=lead,
        fleet=fleet,
        host_group=host_group(),
    )
    return lead, fleet, weights


def _sync(model_dir: str, how: dict[str, str], layout: dict[str, Any]) -> dict[str, Any]:
    lead, fleet, weights = _run(model_dir, layout, engines=2)
    found: list[Any] = []

    def note() -> None:
        versions = lead.call(lambda: [engine.version for engine in fleet.engines])
        found.append((dict(sorted(weights.sender.generations.items())), versions))

    def wait_for(count: int, kind: str) -> None:
        _wait_for(fleet, count, kind)

    def fail(number: int) -> None:
        for name, call in how.items():
            setattr(fleet.engines[number], name, call)

    weights.connect()
    weights.send(1, step=1, check=True)
    note()
    if how.get("hangs") == "join" and fleet:
        # The next one that starts hangs.
        fleet.roster._start = lambda number: starts.pop()
        starts = [ReceivingEngine(weights.shape), hanging := ReceivingEngine(weights.shape)]
        hanging.hangs = "join"
        fleet.roster.lost(0, fleet.engines[0], "killed")
        wait_for(2, "syncing")
    else:
        lead.call(lambda: fail(0))
    weights.send(2, step=2, check=True)
    note()
    lead.run(lambda: wait_for(2, "syncing"))
    weights.send(3, step=3, check=True)
    note()
    if fleet:
        fleet.roster._start = lambda number: ReceivingEngine(weights.shape)
        fleet.roster.lost(0, fleet.engines[0], "killed")
    lead.run(lambda: wait_for(2, "syncing"))
    # Learners are ahead of the engines, and of the one that is back in between.
    weights.keep(4, step=4, reseed=True)
    note()
    if fleet:
        for number in (0, 1):
            fleet.roster.lost(number, fleet.engines[number], "killed")
    lead.run(lambda: wait_for(1, "open"), may_stop=True, rejoining=weights)
    note()
    lead.close()
    return {"found": found, "weights": digests(fleet) if fleet else None}


def digests(fleet: Any) -> list[float]:
    """Of what engines hold that have weights."""
    return [sum(float(view.double().sum()) for _, view in engine.live) for engine in fleet.engines if engine.version]
