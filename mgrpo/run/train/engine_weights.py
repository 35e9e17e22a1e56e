"""The weight sync as one object: transfer groups, then a version of the weights after every `weight_sync_steps` steps.

Rank 0 decides which engines take part and broadcasts that before each sync, so that no learner waits for an engine that another one
has dropped. A restarted engine joins with a group of its own and gets its weights like all others. With many engines some forward
the weights (`mgrpo.sync.sending.seating`); the same sync then serves engines below one that fails.

weights = EngineWeights(policy, ...)        # every learner rank; rank 0 also has the engines
weights.connect()
weights.send(version, step=1, check=True)   # the engines sample training step 1 with them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch.distributed as dist
from torch.autograd.profiler import record_function

from mgrpo.config.derived import infer_layout_of
from mgrpo.config.schema import Engine as EngineSettings
from mgrpo.layout import Layout
from mgrpo.models.shape import ModelShape
from mgrpo.parallel.gather import gather_json
from mgrpo.policy.policy import Policy
from mgrpo.processes.address import LOOPBACK
from mgrpo.rollout.engine import Engine
from mgrpo.rollout.engines.fleet import Calls, Fleet, PendingCall
from mgrpo.rollout.engines.roster import listed, say
from mgrpo.run.ranks.lead import Lead
from mgrpo.run.ranks.process import local_rank, rank
from mgrpo.sync.channel import Sender, announce_failure, unserved_key
from mgrpo.sync.group import connect_store, open_store
from mgrpo.sync.nodes.nodes_sender import NodesSender
from mgrpo.sync.plan import ReshardPlan
from mgrpo.sync.sending.seating import Apart, Link, Seating

TURNS: tuple[Apart | None, ...] = (None, "tree", "direct")
"""Passes of one sync: later passes serve engines whose upstream failed, in a tree of their own and then one by one."""


class EngineWeights:
    """Keeps the engines' weights equal to the policy's. All methods are collective over the learners."""

    def __init__(
        self,
        policy: Policy,
        *,
        shape: ModelShape,
        layout: Layout,
        settings: EngineSettings,
        lead: Lead,
        fleet: Fleet | None,
        host_group: dist.ProcessGroup,
        host: str = LOOPBACK,
    ) -> None:
        """
        Args:
            fleet: the engines, on rank 0.
            host_group: gloo group of all learners.
            host: address of this machine for the other learners.
        """
        self.policy, self.shape, self.layout, self.settings = policy, shape, layout, settings
        self.lead, self._fleet, self.host_group = lead, fleet, host_group
        self.host = host
        self.present: tuple[int, int] | None = None
        """The version of the policy's weights, and the training step that is sampled next."""
        self.version: int | None = None
        """Version that was last sent to all engines; engines started since then have a newer one."""
        self.num_served = 0
        """Number of engines that received weights in the last `send` or `keep`."""
        self.seating = Seating()
        """The engines' places in the broadcast trees, on rank 0."""
        self.heads: dict[int, int] = {}
        """Engines that learners send to in this sync, with their seats."""

    @property
    def bytes_moved(self) -> int:
        """Bytes moved by the last `send` or `keep`."""
        return self.plan.bytes_moved // self.plan.engines * self.num_served if self.num_served else 0

    @property
    def plan(self) -> ReshardPlan:
        """The transfers of each sync; available after `connect`."""
        return self.sender.plan

    @property
    def fleet(self) -> Fleet:
        """The engines; on rank 0 only."""
        assert self._fleet is not None, "only rank 0 has the engines"
        return self._fleet

    def connect(self) -> None:
        """Plan the sync and form the transfer groups.

        Raises:
            RuntimeError: no engine has joined within `weight_sync_timeout` seconds.
        """
        settings = self.settings
        # Rank 0 keeps the store that it serves.
        served = self.lead.call(self._open_store)
        host, port = self.lead.share(lambda: (served or (None, "", 0))[1:])
        store = served[0] if served else connect_store(host, port, settings.weight_sync_timeout)
        nodes = (
            [int(node) for node in gather_json(rank() - local_rank(), self.host_group)] if settings.shares_gpus else []
        )
        make: Callable[..., Sender] = Sender
        if len(set(nodes)) > 1:
            make = partial(NodesSender, nodes=nodes)
        self.sender = make(
            self.policy.sync_boxes(),
            holdings=self.policy.holdings(self.host_group),
            model=self.shape,
            lora=self.policy.lora,
            train_layout=self.layout,
            infer_layout=infer_layout_of(settings),
            rank=self.policy.rank,
            dtype=self.policy.dtype,
            store=store,
            host=host,
            port=port,
            bucket_bytes=settings.weight_sync_bucket_mb << 20,
            timeout_s=settings.weight_sync_timeout,
            share_gpus=settings.shares_gpus,
        )
        # Engines that share the learners' GPUs are beside them.
        self.seating.direct = None if settings.shares_gpus else self.plan.sources.trees(self.plan.engines)
        self.lead.call(lambda: self.fleet.require_weights())
        self._join(self._begin())

    @record_function("mgrpo: weight sync")
    def send(self, version: int, *, step: int, check: bool = False) -> None:
        """Send every engine the present weights as `version`, and the random stream of training step `step`.

        Waits for starting engines if too few are ready. An engine that fails is lost; the others still get the weights.

        Args:
            check: compare digests of every tensor with those of the engines.
        Raises:
            RuntimeError: a digest differs (names engine, worker and tensors), or too few engines are left.
            Stopped: the run was stopped while it waited for engines.
        """
        self.present, self.version = (version, step), version
        # A run that is asked to end finishes the step that it is in, and only stops waiting.
        if not self.lead.share(lambda: self.fleet.are_members_there):
            self.lead.run(lambda: self.fleet.wait_for_members(), may_stop=True)
        self._sync(self._begin(), check=check)

    def wants_rejoin(self) -> bool:
        """True if engines that were started since the last sync need its weights. Rank 0 only."""
        # Learners that have released their memory have no weights to send.
        return not self.settings.takes_turns and self.fleet.needs_sync

    def rejoin(self) -> None:
        """Send the policy's weights to engines that were started since the last sync."""
        if self.present is not None:
            self._sync(self._begin(only_stale=True), apart="tree")

    def keep(self, version: int, *, step: int, reseed: bool) -> None:
        """Send the present weights only to engines that were started since the last sync.

        Args:
            version: version of the policy's weights.
            step: training step that is sampled next.
            reseed: begin its random stream; the engines must be paused.
        """
        self.present, self.num_served = (version, step), 0
        if reseed:
            self.lead.run(lambda: self.fleet.reseed(step))
        if stale := self._begin(only_stale=True):
            self._sync(stale, apart="tree")

    def _begin(self, *, only_stale: bool = False) -> dict[int, int]:
        """Engines that take part, each with its generation, as rank 0 broadcasts them."""
        return dict(self.lead.share(lambda: [*self.fleet.begin_sync(only_stale=only_stale).items()]))

    def _join(self, members: Mapping[int, int], apart: Apart | None = None) -> bool:
        """Form the missing transfer groups, see `Seating.arrange`; returns True if there were any."""

        def arranged() -> tuple[list[int], list[tuple[int, int]]]:
            return self.seating.arrange(members, apart=apart), [*self.seating.heads().items()]

        joining, heads = self.lead.share(arranged)
        seats = dict(heads)
        self.heads = {engine: seat for engine, seat in seats.items() if engine in members}
        for engine in self.sender.generations.keys() - seats:
            self.sender.leave(engine)
        if joining:
            what = "join the weight-transfer group"
            invited = {engine: members[engine] for engine in joining}
            new = {engine: seat for engine, seat in self.heads.items() if self.sender.generations.get(engine) != seat}
            self._together(
                lambda: self.fleet.calls(self.fleet.seated(invited), self._invite, what),
                partial(self.sender.join, new),
                what=what,
            )
        return bool(joining)

    def _invite(self, number: int, engine: Engine) -> Future[None]:
        seat, followers = self.seating.seats[number], self.seating.followers(number)
        first = self.seating.first(number)
        invitation = self.sender.invitation(
            number, seat.number, first=first, upstream=seat.upstream, followers=followers
        )
        answer = engine.join(invitation)
        answer.add_done_callback(partial(self._announce, (number, seat.number)))
        return answer

    def _announce(self, seat: Link, answer: Future[None]) -> None:
        """Rank 0: end the waits of learners and of other engines for a failed engine."""
        if (err := answer.exception()) is not None:
            announce_failure(
                self.sender.store, seat, f"engine {seat[0]} could not join the weight-transfer group: {err}"
            )

    def _sync(self, members: Mapping[int, int], *, check: bool = False, apart: Apart | None = None) -> None:
        assert self.present is not None, "`send` comes first"
        version, step = self.present
        calls: dict[int, PendingCall] = {}
        done: dict[int, int] = {}
        proven: dict[int, int] = {}
        left = members
        for turn in TURNS[TURNS.index(apart) :]:
            # The first weights of an engine are always checked.
            check |= self._join(left, turn)
            called, answered = self._together(
                partial(self._receive, left, version, check=check, step=step),
                partial(self._send, version, sorted(self.heads.keys() & self.sender.generations)),
                what=f"receive weights, version {version}",
            )
            calls |= called or {}
            served, unserved = self.lead.share(partial(self._outcome, answered or (), version))
            done |= dict(served)
            proven |= dict(served) if check else {}
            left = {engine: left[engine] for engine in unserved}
            if not left:
                break
        if check:
            truth = self.sender.digests()
            dist.all_reduce(truth, group=self.host_group)
            self.lead.run(lambda: self.sender.compare(version, truth, proven))
        self.num_served = len(done)
        self.lead.call(lambda: self.fleet.end_sync(version, calls, done))

    def _receive(self, members: Mapping[int, int], version: int, *, check: bool, step: int) -> dict[int, PendingCall]:
        return self.fleet.receive_weights(self.fleet.seated(members), version, check=check, step=step)

    def _outcome(self, answered: Sequence[int], version: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Rank 0: engines that received the weights, with their seats; and engines whose upstream failed."""
        seats = {engine: self.seating.seats[engine] for engine in answered}
        keys = {n: unserved_key(n, seat.number, version) for n, seat in seats.items() if seat.upstream}
        unserved = [engine for engine, key in keys.items() if self.sender.store.check([key])]
        if unserved:
            why = self.sender.store.get(keys[unserved[0]]).decode()
            who = f"engine {unserved[0]} gets" if len(unserved) == 1 else f"engines {listed(unserved)} get"
            say(f"{who} the weights of version {version} apart from the others: {why}")
        for engine in unserved:
            self.sender.store.delete_key(keys[engine])
        return [(engine, seat.number) for engine, seat in seats.items() if engine not in unserved], unserved

    def _open_store(self) -> tuple[dist.TCPStore, str, int]:
        """Rank 0: the key-value server of learners and engines, with its host and port."""
        host = self.fleet.meeting_host or self.host
        store, port = open_store(host, self.settings.weight_sync_timeout)
        return store, host, port

    def _send(self, version: int, engines: Sequence[int]) -> dict[int, str]:
        self.policy.wait_for_weights()
        return self.sender.send(version, engines)

    def _together(
        self, engines_part: Callable[[], Calls], own_part: Callable[[], dict[int, str]], *, what: str
    ) -> tuple[Calls | None, list[int] | None]:
        """Run both ends of a transfer at once; returns, on rank 0, the calls of the engines and the engines that succeeded.

        Args:
            own_part: the learners' end; returns reasons of failure, by engine. An engine that one learner cannot reach is lost for all.
        """
        calls = self.lead.call(engines_part)
        # Ranks that have less to do must not wait for rank 0's messages, of which it sends none until it is done itself.
        failures = {int(n): why for found in gather_json(own_part(), self.host_group) for n, why in found.items()}
        for engine in failures:
            self.sender.leave(engine)
        return calls, self.lead.run(lambda: self.fleet.finish(calls or {}, what, failures))
