"""Weight-transfer engine that vLLM makes in each worker: it receives exactly the worker's slices, in place.

Active only if the engine's environment sets `MGRPO_ENGINE=1`. Its changes to vLLM: `rebound`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from mgrpo.models.adapters import are_apart
from mgrpo.models.shape import ModelShape
from mgrpo.processes.lifetime import die_with_parent
from mgrpo.sync.channel import invited_lora
from mgrpo.sync.live import Held
from mgrpo.sync.vllm_plugin.live_weights import (
    adapter_boxes,
    check_experts,
    check_in_place,
    check_written,
    live_boxes,
)
from mgrpo.sync.vllm_plugin.rebound import rebind
from mgrpo.sync.vllm_plugin.receiver import Receiver, failure_announced, joined

BACKEND = "mgrpo"
ASKED = "MGRPO_ENGINE"
"""Set to "1" in the environment of an engine's processes."""
RUN_ANSWERS_S = 5.0
"""Seconds in which rank 0 of a live run accepts a connection."""


def register() -> None:
    """Plugin entry point; vLLM calls it, possibly several times, in client, engine core and workers."""
    if os.environ.get(ASKED) != "1":
        return
    # The engine core would outlive an engine that is killed; here it is a child of the engine's process.
    if multiprocessing.parent_process() is not None:
        die_with_parent()
    from tqdm import tqdm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    # Otherwise tqdm makes a named semaphore, which stays in /dev/shm when the process is killed.
    tqdm.set_lock(threading.RLock())
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())
    rebind(on_cpu=current_platform.is_cpu())
    # vLLM's attention may be the first user of AMX in its process, and dies without the kernel's permission.
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _engine_class() -> type:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class Invitation(WeightTransferInitInfo):
        """`mgrpo.sync.channel.Sender.invitation`."""

        invitation: dict[str, Any]
        is_trial: bool = False
        """Only check that an invitation with this `model` could be accepted."""

    @dataclass
    class Update(WeightTransferUpdateInfo):
        seed: int
        """Seed of the sampler."""
        version: int | None = None
        """Version of the weights; None: no weights are sent, only the sampler is seeded."""
        check: bool = False

    class ReshardEngine(WeightTransferEngine[Invitation, Update]):
        """Receives exactly this worker's slices, in place."""

        init_info_cls, update_info_cls = Invitation, Update
        receiver: Receiver | None = None
        padding: Sequence[torch.Tensor] = ()

        def init_transfer_engine(self, init_info: Invitation) -> None:
            invitation, parallel = init_info.invitation, self.parallel_config
            if init_info.is_trial:
                self._check(invitation)
                check_model(self.model_config, invitation["model"])
                return
            worker = parallel.data_parallel_rank * parallel.world_size + parallel.rank

            def make() -> Receiver:
                boxes, self.padding = live_boxes(self.model, invitation["model"])
                if self.vllm_config.load_config.load_format == "dummy":
                    check_written(self.model, [*(view for _, view in boxes), *self.padding])
                loaded: Held = ()
                if are_apart(lora := invited_lora(invitation)):
                    boxes, loaded = adapter_boxes(self.model, invitation["model"], lora), boxes
                return Receiver(boxes, loaded=loaded, worker=worker, invitation=invitation)

            with failure_announced(invitation, worker):
                self._check(invitation)
                earlier, self.receiver = self.receiver, None
                self.receiver = joined(earlier, invitation, make)

        def _check(self, invitation: dict[str, Any]) -> None:
            check_free(self.receiver, invitation)
            check_experts(self.model, has_experts=invitation["model"]["experts"] is not None)
            check_in_place(self.model)

        def start_weight_update(self) -> None: ...

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # The base class ends in torch.accelerator.synchronize(), which raises without an accelerator. It waits for what is sent
            # on as well: an engine below that takes nothing holds up this answer until it is given up.
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        @torch.no_grad()
        def receive_weights(self, update_info: Update) -> None:
            # Ranks with requests of their own would otherwise draw the same numbers for them.
            torch.manual_seed(update_info.seed + self.parallel_config.data_parallel_rank)
            if update_info.version is None:
                return
            if self.receiver is None:
                raise RuntimeError("the engine has not joined a transfer group")
            if not self.receiver.receive(update_info.version):
                return
            # An engine that has slept wakes up with other memory, of which the sync writes the boxes only.
            for view in self.padding:
                view.zero_()
            if update_info.check:
                self.receiver.report_digests(update_info.version)

        def finish_weight_update(self) -> None: ...

        def shutdown(self) -> None:
            if self.receiver is not None:
                self.receiver.close()
            self.receiver = None

    return ReshardEngine


def check_free(receiver: Receiver | None, invitation: dict[str, Any]) -> None:
    """Raise RuntimeError if the engine takes part in another run that is still alive."""
    if receiver is None or not receiver.is_open:
        return
    host, port = receiver.place
    if (host, port) == (invitation.get("host"), invitation.get("port")):
        return
    try:
        socket.create_connection((host, port), timeout=RUN_ANSWERS_S).close()
    except OSError:
        return
    raise RuntimeError(
        f"the engine takes part in another run, whose rank 0 is at {host}:{port}; end that run first, or use another engine"
    )


def check_model(model_config: Any, shape: dict[str, Any]) -> None:
    """Raise ValueError unless vLLM's `model_config` is that of a model with this `ModelShape`."""
    from mgrpo.models.family import shape_of
    from mgrpo.models.hf_config import read_hf_config

    name = model_config.model
    # As the trainer reads it; what transformers makes of it may have other names.
    own = shape_of(read_hf_config(name) if os.path.isdir(name) else model_config.hf_config.to_dict())
    wanted = ModelShape.from_dict(shape)
    differing = [
        f"{field.name}={getattr(own, field.name)} instead of {getattr(wanted, field.name)}"
        for field in fields(wanted)
        if getattr(own, field.name) != getattr(wanted, field.name)
    ]
    if differing:
        raise ValueError(
            f"the engine's model, {name}, is not the run's: {', '.join(differing[:4])}; start the engine with the folder that "
            "model_name_or_path names"
        )
