"""The weight sync of SmolLM2-135M between processes of this machine, over shared memory and over gloo, in turns.

Two training ranks and one engine worker, each a process with one thread and random weights; no Ray and no vLLM. Digests of all
tensors are compared for each transport.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import statistics
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.placement.box_table import HeldBoxes
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import engine_boxes, local_parameters, training_boxes
from mgrpo.sync import shared
from mgrpo.sync.channel import DIGEST, Sender, digest_key
from mgrpo.sync.group import connect_store, open_store
from mgrpo.sync.vllm_plugin.receiver import Receiver

REPEATS = 8
PACKAGES = ("mgrpo", "torch")
PROTOCOL = (
    "Two training ranks and one worker, each a process with one thread and random weights; the transports take turns, "
    "{repeats} syncs of each. Medians: seconds from the first end that begins to the last that is done, CPU seconds of all "
    "three. The load average is that of the machine, these processes included."
)
HOST, TIMEOUT_S = "127.0.0.1", 120
TRANSPORTS = ("gloo", "shared memory")
SMOLLM2 = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
EVEN = SMOLLM2 | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 72}


@dataclass(frozen=True)
class Case:
    """Two training ranks and one worker."""

    what: str
    layout: Layout
    config: dict[str, Any]
    dtype: torch.dtype

    @property
    def model(self) -> ModelShape:
        """Its shape."""
        return shape_of(self.config)

    @property
    def holdings(self) -> list[list[Box]]:
        """The boxes of every rank; under ZeRO-3 an even run of every parameter."""
        if self.layout.zero_stage < 2:
            return training_boxes(self.model, self.layout)
        size = self.layout.num_shards
        return [
            [
                piece.box
                for parameter in local_parameters(self.model, self.layout, rank).values()
                for total in (torch.Size(parameter.shape).numel(),)
                for piece in parameter.run(rank * total // size, (rank + 1) * total // size)
            ]
            for rank in range(self.layout.world_size)
        ]


TENSOR = "TP 2, float32; 8 query and 4 key-value heads, because 9 and 3 are not divisible"
PIPELINE = "PP 2, float32, as in examples/configs/smollm2.yaml"
MASTERS = "ZeRO-3, float32 masters sent in bfloat16"
CASES = {
    "tensor": Case(TENSOR, Layout(world_size=2, tensor=2), EVEN, torch.float32),
    "pipeline": Case(PIPELINE, Layout(world_size=2, pipeline=2), SMOLLM2, torch.float32),
    "masters": Case(MASTERS, Layout(world_size=2, zero_stage=3), SMOLLM2, torch.bfloat16),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--bucket-mb", type=int, default=256, help="weight_sync_bucket_mb")
    parser.add_argument("--layers", type=int, default=30, help="of the model")


def file_name(args: argparse.Namespace) -> str:
    return "sync-cpu"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cases = {}
    for name in args.cases:
        case = dataclasses.replace(CASES[name], config=CASES[name].config | {"num_hidden_layers": args.layers})
        found = cases[name] = measure_case(case, args)
        print(f"{found['what']}: {found['megabytes']:.0f} MB, {found['times faster']:.1f} times faster", flush=True)
    return {"weight_sync_bucket_mb": args.bucket_mb, "cases": cases}


def live(boxes: list[Box], dtype: torch.dtype) -> list[tuple[Box, torch.Tensor]]:
    """Random values for the slices that a process holds: the same of a slice that several hold."""

    def values(box: Box) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(repr(box).encode()))
        return torch.randn(box.shape, generator=generator).to(dtype)

    return [(box, values(box)) for box in boxes]


def learner(case: Case, rank: int, ports: list[int], args: argparse.Namespace, barrier: Any, results: Any) -> None:
    """A training rank: what `turns` found, and then its digests."""
    torch.set_num_threads(1)
    holdings = case.holdings
    held = live(holdings[rank], torch.float32)
    size: dict[str, Any] = {
        "model": case.model,
        "dtype": case.dtype,
        "bucket_bytes": args.bucket_mb << 20,
        "timeout_s": TIMEOUT_S,
    }
    layouts: dict[str, Any] = {
        "train_layout": case.layout,
        "infer_layout": InferLayout(),
        "holdings": HeldBoxes.of(holdings),
        "rank": rank,
    }
    stores = [(port, connect_store(HOST, port, TIMEOUT_S)) for port in ports]
    senders = [Sender(held, **size, **layouts, host=HOST, port=port, store=store) for port, store in stores]
    for sender in senders:
        if rank == 0:
            results.put(sender.invitation(0))
        sender.join({0: 0})
    results.put(list(turns([partial(sender.send, engines=[0]) for sender in senders], args.repeats + 1, barrier)))
    results.put(senders[0].digests().numpy())


def worker(case: Case, invitations: Any, args: argparse.Namespace, barrier: Any, results: Any) -> None:
    """The engine's end: what `turns` found; its digests are in the store."""
    torch.set_num_threads(1)
    held = live(engine_boxes(case.model, InferLayout())[0], case.dtype)
    for _, view in held:
        view.zero_()
    receivers = []
    connect = shared.connect
    for transport in TRANSPORTS:
        # As if the training ranks ran on another machine.
        shared.connect = connect if transport == "shared memory" else lambda *_, **__: None
        receivers.append(Receiver(held, worker=0, invitation=invitations.get()))

    def receive(receiver: Receiver) -> Any:
        def run(version: int) -> None:
            receiver.receive(version)
            if version == args.repeats + 1:  # which does not count
                receiver.report_digests(version)
                for _, view in held:
                    view.zero_()

        return run

    results.put(list(turns([receive(receiver) for receiver in receivers], args.repeats + 1, barrier)))


def turns(calls: list[Any], rounds: int, barrier: Any) -> Iterator[tuple[str, int, float, float, float]]:
    """Every transport once in each round: its name, the round, begin and end, and CPU seconds."""
    for number in range(rounds + 1):
        for transport, call in zip(TRANSPORTS, calls, strict=True):
            barrier.wait()
            used, begin = time.process_time(), time.monotonic()
            call(number)
            yield transport, number, begin, time.monotonic(), time.process_time() - used


def measure_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds by transport, without the first round and the last."""
    context = multiprocessing.get_context("spawn")
    stores = [open_store(HOST, TIMEOUT_S) for _ in TRANSPORTS]
    ports = [port for _, port in stores]
    barrier, invitations = context.Barrier(3), context.Queue()
    results = [context.Queue() for _ in range(3)]
    given: list[tuple[Any, Any]] = [(learner, (case, rank, ports, args, barrier, results[rank])) for rank in range(2)]
    given.append((worker, (case, invitations, args, barrier, results[2])))
    ends = [context.Process(target=target, args=own, daemon=True) for target, own in given]
    for end in ends:
        end.start()
    for _ in TRANSPORTS:
        invitations.put(results[0].get(timeout=TIMEOUT_S))
    seen = list(zip(*(queue.get() for queue in results), strict=True))
    truth = sum(results[rank].get() for rank in range(2))[0]
    for end in ends:
        end.join(TIMEOUT_S)
    for transport, (store, _) in zip(TRANSPORTS, stores, strict=True):
        reported = np.frombuffer(store.get(digest_key(0, 0, 0, args.repeats + 1)), DIGEST)
        assert np.array_equal(reported, truth), f"{transport}: other weights arrived"
    sent = sum(box.size for box in engine_boxes(case.model, InferLayout())[0]) * case.dtype.itemsize
    record: dict[str, Any] = {"what": case.what, "megabytes": sent / 1e6, "load_average": os.getloadavg()[0]}
    for transport in TRANSPORTS:
        counted = [each for each in seen if each[0][0] == transport and 0 < each[0][1] < args.repeats + 1]
        walls = [max(end[3] for end in each) - min(end[2] for end in each) for each in counted]
        record[transport] = {
            "seconds_median": statistics.median(walls),
            "seconds": walls,
            "cpu_seconds_median": statistics.median(sum(end[4] for end in each) for each in counted),
        }
    record["times faster"] = record["gloo"]["seconds_median"] / record["shared memory"]["seconds_median"]
    return record
