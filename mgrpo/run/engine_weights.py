"""The weight sync as one object: one transfer group per engine, then a version of the weights after every step.

weights = EngineWeights(policy, ...)        # every learner rank; rank 0 also has the engines
weights.connect()
weights.send(version, step=1, check=True)   # the engines sample training step 1 with them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from mgrpo.config.schema import Engine as EngineSettings
from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import ModelShape
from mgrpo.policy.policy import Policy
from mgrpo.processes.address import LOOPBACK
from mgrpo.rollout.fleet import Fleet
from mgrpo.run.lead import Lead
from mgrpo.sync.channel import Sender
from mgrpo.sync.group import connect_store, open_store
from mgrpo.sync.plan import ReshardPlan

T = TypeVar("T")


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
            host: where the other learners reach this machine.
        """
        self.policy, self.shape, self.layout, self.settings = policy, shape, layout, settings
        self.lead, self._fleet, self.host_group = lead, fleet, host_group
        self.host = host

    @property
    def plan(self) -> ReshardPlan:
        """What each sync moves; there is one once the engines are connected."""
        return self.sender.plan

    @property
    def fleet(self) -> Fleet:
        """The engines; on rank 0 only."""
        assert self._fleet is not None, "only rank 0 has the engines"
        return self._fleet

    def connect(self) -> None:
        """Plan the sync, and form the transfer groups.

        Raises:
            RuntimeError: an engine or a rank has not joined within `weight_sync_timeout` seconds.
        """
        settings = self.settings
        # Rank 0 keeps the store that it serves.
        served = self.lead.call(self._open_store)
        place = self.lead.share(
            lambda: {"host": np.array(served and served[1]), "port": np.array(served and served[2])}
        )
        host, port = place["host"].item(), place["port"].item()
        store = served[0] if served else connect_store(host, port, settings.weight_sync_timeout)
        self.sender = Sender(
            self.policy.boxes(),
            holdings=self.policy.holdings(self.host_group),
            model=self.shape,
            train_layout=self.layout,
            infer_layout=InferLayout(engines=settings.vllm_num_engines, tensor=settings.vllm_tensor_parallel_size),
            rank=self.policy.rank,
            dtype=self.policy.dtype,
            store=store,
            host=host,
            port=port,
            bucket_bytes=settings.weight_sync_bucket_mb << 20,
            timeout_s=settings.weight_sync_timeout,
            share_gpus=settings.shares_gpus,
        )
        self._together(self._invite, self.sender.join, what="join the weight-transfer group")

    @record_function("mgrpo: weight sync")
    def send(self, version: int, *, step: int, check: bool = False) -> None:
        """Give every engine the present weights as `version`, and the random stream of training step `step`.

        Args:
            check: prove by digests of every tensor that the engines hold exactly these weights.
        Raises:
            RuntimeError: the sync did not complete in time, or a digest differs; it names engine, worker and tensors.
        """
        digests = self._together(
            lambda: self.fleet.receive_weights(version, check=check, step=step),
            partial(self._send, version, check=check),
            what=f"receive weights, version {version}",
        )
        if digests is not None:
            self.lead.run(partial(self.sender.compare, version, digests))

    def keep(self, *, step: int) -> None:
        """No new weights: only begin the random stream of training step `step`."""
        self.lead.run(lambda: self.fleet.reseed(step))

    def _open_store(self) -> tuple[dist.TCPStore, str, int]:
        """Rank 0: the key-value server in which learners and engines meet, and where it is."""
        host = self.fleet.meeting_host or self.host
        store, port = open_store(host, self.settings.weight_sync_timeout)
        return store, host, port

    def _invite(self) -> list[Future[None]]:
        return [engine.join(self.sender.invitation(number)) for number, engine in enumerate(self.fleet.engines)]

    def _send(self, version: int, *, check: bool) -> torch.Tensor | None:
        """The learners' end of a sync; with `check` the digests that the engines must have, see `Sender.digests`."""
        self.policy.wait_for_weights()
        self.sender.send(version)
        if not check:
            return None
        digests = self.sender.digests()
        dist.all_reduce(digests, group=self.host_group)
        return digests

    def _together(
        self, engines_part: Callable[[], Sequence[Future[None]]], own_part: Callable[[], T], *, what: str
    ) -> T:
        """Both ends of a transfer at once; the result of the learners' end, `own_part`.

        When that fails because an engine has failed, the engine's own error is raised.
        """
        calls = self.lead.call(engines_part)
        try:
            result = own_part()
            # Ranks that have less to do must not wait for rank 0's messages, of which it sends none until it is done itself.
            dist.barrier(group=self.host_group)
        except RuntimeError:
            self.lead.call(lambda: self.fleet.raise_failure(calls or (), what, within_s=1))
            raise
        self.lead.run(lambda: self.fleet.finish(calls or (), what))
        return result
