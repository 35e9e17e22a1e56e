"""The output of a learner after a step: its weights to the engines, and its part of a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mgrpo.checkpoint.saver import Saver
from mgrpo.config import Config
from mgrpo.config.derived import infer_layout_of
from mgrpo.layout import Layout
from mgrpo.models.adapters import are_apart, training_adapter_boxes
from mgrpo.models.placement.box_table import HeldBoxes
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import training_boxes
from mgrpo.parallel import backend
from mgrpo.policy.policy import Policy
from mgrpo.rehearsal.recorder import Recorder, site
from mgrpo.run.train.learner import Learner
from mgrpo.sync.channel import Sender
from mgrpo.sync.sending.seating import Seating


class _Store(dist.Store):
    """A key-value server on which all other ranks have already written every awaited key."""

    def clone(self) -> _Store:
        return self

    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> bytes:
        return b""

    def compare_set(self, key: str, expected_value: str, desired_value: Any) -> bytes:
        return desired_value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None: ...

    def check(self, keys: Sequence[str]) -> bool:
        return True


class _Sent(dist.Work):
    """A transfer that is over."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Options: ...


class _Transfers:
    """A group of learners and an engine's workers, as ProcessGroupNCCL, which a CPU build lacks; it delivers nothing."""

    Options = _Options
    supports_coalescing = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def send(self, buckets: Sequence[torch.Tensor], peer: int, tag: int) -> dist.Work:
        for bucket in buckets:
            assert bucket.is_cuda and bucket.is_contiguous(), f"NCCL cannot send this bucket, at {site()}"
            key = "weight sync", self._recorder.now, "send"
            self._recorder.sent[key] += bucket.nbytes
            self._recorder.calls[key] += 1
        return _Sent()

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> dist.Work:
        return _Sent()

    def abort(self) -> None: ...


@contextmanager
def _transfers(recorder: Recorder) -> Iterator[None]:
    names = vars(dist)
    before = names.get("ProcessGroupNCCL")

    class Group(_Transfers):
        def __init__(self, store: dist.Store, rank: int, size: int, options: _Options) -> None:
            super().__init__(recorder)

    names["ProcessGroupNCCL"] = Group
    try:
        yield
    finally:
        if before is None:
            del names["ProcessGroupNCCL"]
        else:
            names["ProcessGroupNCCL"] = before


def send_weights(
    policy: Policy, config: Config, shape: ModelShape, layout: Layout, recorder: Recorder, *, checks: bool
) -> None:
    """The learner's end of one weight sync.

    Args:
        checks: also the digests by which engines verify their weights.
    """
    engines = config.engine
    with _transfers(recorder):
        sender = Sender(
            policy.sync_boxes(),
            holdings=HeldBoxes.of(_holdings(policy, shape, layout)),
            model=shape,
            lora=policy.lora,
            train_layout=layout,
            infer_layout=infer_layout_of(engines),
            rank=policy.rank,
            dtype=policy.dtype,
            store=_Store(),
            host="127.0.0.1",
            port=0,
            bucket_bytes=engines.weight_sync_bucket_mb << 20,
            timeout_s=engines.weight_sync_timeout,
        )
        seating = Seating(sender.plan.sources.trees(engines.vllm_num_engines))
        seating.arrange(dict.fromkeys(range(engines.vllm_num_engines), 0))
        seats = seating.heads()
        failures = sender.join(seats) or sender.send(1, seats)
        if failures:
            raise RuntimeError("; ".join(failures.values()))
        if checks:
            sender.digests()
        sender.close()


def _holdings(policy: Policy, shape: ModelShape, layout: Layout) -> list[list[Box]]:
    """The boxes of every rank. Under ZeRO-2 and 3 one other rank holds the rest of this one's parameters."""
    holdings = training_boxes(shape, layout)
    if are_apart(policy.lora):
        adapters = training_adapter_boxes(shape, layout, policy.lora)
        return [own + added for own, added in zip(holdings, adapters, strict=True)]
    if layout.sharding < 2:
        return holdings
    places = {name: place for name, place in policy.parameters.places.items() if not place.is_copy}
    shared = {piece.box for place in places.values() for piece in place.pieces}
    everyone = [[box for box in boxes if box not in shared] for boxes in holdings]
    runs = {shard.name: (shard.start, shard.start + len(shard.main)) for shard in policy.shards}
    other = next(rank for rank in range(layout.world_size) if rank != policy.rank)
    for name, place in places.items():
        total = sum(piece.box.size for piece in place.pieces)
        start, stop = runs.get(name, (0, 0))
        for begin, end in ((0, start), (stop, total)):
            everyone[other] += [piece.box for piece in place.run(begin, end)] if end > begin else []
    everyone[policy.rank] = [box for box, _ in policy.boxes()]
    return everyone


def save_state(learner: Learner) -> None:
    """Write this rank's files of a checkpoint, at once and behind the training; then restore its random states.

    Rank 0 would wait for the other ranks' files: it writes as another rank.
    """
    parts, shapes = learner.state.parts(), learner.state.full_shapes()
    world_size = dist.get_world_size()
    rank = max(dist.get_rank(), 1)
    with tempfile.TemporaryDirectory() as folder:
        for step, asynchronous in enumerate((False, True), start=1):
            # Other threads would write fake tensors: the mode that fakes them is this thread's.
            saver = Saver(folder, rank, world_size, keep_last_n=-1, asynchronous=asynchronous, threads=1)
            saver.save(step, parts, learner.state_dict(), shapes, attempt=f"{step:032x}")
            saver.wait()
    backend.set_random_states(backend.random_states())
