"""The weight sync of SmolLM2-135M between processes of this machine, over shared memory and over gloo, in turns.

    python tools/bench_sync.py [--rounds 9] [--cases tensor pipeline masters] [--bucket-mb 256]
    python tools/bench_sync.py --plans

Two training ranks and one engine worker, each a process with one thread and random weights; no Ray and no vLLM. Prints the
median seconds from the first end that begins to the last that is done, and writes benchmarks/sync-cpu.json. Digests of all
tensors are compared for each transport.

With `--plans`: what every process computes before the first sync of a large run, compared with the plan that goes box by box and
engine by engine (`tests/unit/sync/plan_oracle.py`), what rank 0 sends to each engine, and the communicators that a learner holds;
writes benchmarks/sync-plan.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from bench_loop import cpu_model

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.placement.box_table import HeldBoxes, Tensors
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import engine_boxes, hf_tensors, local_parameters, training_boxes
from mgrpo.parallel import backend
from mgrpo.planner.engines.transfers import sync_seconds
from mgrpo.planner.hardware import GPUS, Hardware
from mgrpo.planner.plan_command import shipped_configs
from mgrpo.sync import shared
from mgrpo.sync.channel import DIGEST, Sender, digest_key
from mgrpo.sync.group import connect_store, open_store
from mgrpo.sync.plan import ReshardPlan, plan
from mgrpo.sync.sending.layout_tables import training_holdings
from mgrpo.sync.sending.seating import Seating
from mgrpo.sync.vllm_plugin.receiver import Receiver

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
TIMEOUT_S = 120
GATHERING = 4
"""Ranks between which `gather_held` is timed."""
BUCKET_BYTES = 256 << 20
PROTOCOL = (
    "Two training ranks and one worker, each a process with one thread and random weights; the transports take turns, "
    "{rounds} syncs of each. Medians: seconds from the first end that begins to the last that is done, CPU seconds of all "
    "three. The load average is that of the machine, these processes included."
)
TRANSPORTS = ("gloo", "shared memory")
SMOLLM2 = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True)
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


CASES = {
    "tensor": Case(
        what="TP 2, float32; 8 query and 4 key-value heads, because 9 and 3 are not divisible",
        layout=Layout(world_size=2, tensor=2),
        config=SMOLLM2 | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 72},
        dtype=torch.float32,
    ),
    "pipeline": Case(
        what="PP 2, float32, as in examples/configs/smollm2.yaml",
        layout=Layout(world_size=2, pipeline=2),
        config=SMOLLM2,
        dtype=torch.float32,
    ),
    "masters": Case(
        what="ZeRO-3, float32 masters sent in bfloat16",
        layout=Layout(world_size=2, zero_stage=3),
        config=SMOLLM2,
        dtype=torch.bfloat16,
    ),
}


def live(boxes: list[Box], dtype: torch.dtype, seed: int) -> list[tuple[Box, torch.Tensor]]:
    """Random values for the slices that a process holds."""
    torch.manual_seed(seed)
    return [(box, torch.randn(box.shape).to(dtype)) for box in boxes]


def learner(case: Case, rank: int, ports: list[int], args: argparse.Namespace, barrier: Any, results: Any) -> None:
    """A training rank: what `turns` found, and then its digests."""
    torch.set_num_threads(1)
    holdings = case.holdings
    held = live(holdings[rank], torch.float32, seed=rank)
    senders = [
        Sender(
            held,
            holdings=HeldBoxes.of(holdings),
            model=case.model,
            train_layout=case.layout,
            infer_layout=InferLayout(),
            rank=rank,
            dtype=case.dtype,
            store=connect_store(HOST, port, TIMEOUT_S),
            host=HOST,
            port=port,
            bucket_bytes=args.bucket_mb << 20,
            timeout_s=TIMEOUT_S,
        )
        for port in ports
    ]
    for sender in senders:
        if rank == 0:
            results.put(sender.invitation(0))
        sender.join({0: 0})
    results.put(list(turns([partial(sender.send, engines=[0]) for sender in senders], args.rounds, barrier)))
    results.put(senders[0].digests().numpy())


def worker(case: Case, invitations: Any, args: argparse.Namespace, barrier: Any, results: Any) -> None:
    """The engine's end: what `turns` found; its digests are in the store."""
    torch.set_num_threads(1)
    held = live(engine_boxes(case.model, InferLayout())[0], case.dtype, seed=9)
    receivers = []
    connect = shared.connect
    for transport in TRANSPORTS:
        # As if the training ranks ran on another machine.
        shared.connect = connect if transport == "shared memory" else lambda *_, **__: None
        receivers.append(Receiver(held, worker=0, invitation=invitations.get()))

    def receive(receiver: Receiver) -> Any:
        def run(version: int) -> None:
            receiver.receive(version)
            if version == args.rounds:  # which does not count
                receiver.report_digests(version)
                for _, view in held:
                    view.zero_()

        return run

    results.put(list(turns([receive(receiver) for receiver in receivers], args.rounds, barrier)))


def turns(calls: list[Any], rounds: int, barrier: Any) -> Iterator[tuple[str, int, float, float, float]]:
    """Every transport once in each round: its name, the round, begin and end, and CPU seconds."""
    for number in range(rounds + 1):
        for transport, call in zip(TRANSPORTS, calls, strict=True):
            barrier.wait()
            used, begin = time.process_time(), time.monotonic()
            call(number)
            yield transport, number, begin, time.monotonic(), time.process_time() - used


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds by transport, without the first round and the last."""
    context = multiprocessing.get_context("spawn")
    stores = [open_store(HOST, TIMEOUT_S) for _ in TRANSPORTS]
    ports = [port for _, port in stores]
    barrier, invitations = context.Barrier(3), context.Queue()
    results = [context.Queue() for _ in range(3)]
    ends = [
        context.Process(target=learner, args=(case, rank, ports, args, barrier, results[rank])) for rank in range(2)
    ]
    ends.append(context.Process(target=worker, args=(case, invitations, args, barrier, results[2])))
    for end in ends:
        end.start()
    try:
        sent = 0
        for _ in TRANSPORTS:
            invitation = results[0].get()
            sent = (
                sum(torch.Size(shape).numel() for boxes in invitation["incoming"][0].values() for _, _, shape in boxes)
                * case.dtype.itemsize
            )
            invitations.put(invitation)
        seen = list(zip(*(queue.get() for queue in results), strict=True))
        truth = sum(results[rank].get() for rank in range(2))[0]
    finally:
        for end in ends:
            end.join(TIMEOUT_S)
    for transport, (store, _) in zip(TRANSPORTS, stores, strict=True):
        reported = np.frombuffer(store.get(digest_key(0, 0, 0, args.rounds)), DIGEST)
        assert np.array_equal(reported, truth), f"{transport}: other weights arrived"
    record: dict[str, Any] = {"what": case.what, "megabytes": sent / 1e6, "load_average": os.getloadavg()[0]}
    for transport in TRANSPORTS:
        counted = [each for each in seen if each[0][0] == transport and 0 < each[0][1] < args.rounds]
        walls = [max(end[3] for end in each) - min(end[2] for end in each) for each in counted]
        record[transport] = {
            "seconds_median": statistics.median(walls),
            "seconds": walls,
            "cpu_seconds_median": statistics.median(sum(end[4] for end in each) for each in counted),
        }
    record["times faster"] = record["gloo"]["seconds_median"] / record["shared memory"]["seconds_median"]
    return record


PLANS = {
    "32B, 1,024 x 512": (
        "qwen2.5-32b",
        Layout(world_size=1024, tensor=4, pipeline=2),
        InferLayout(engines=512, tensor=4),
    ),
    "32B, 1,024 x 1,024": (
        "qwen2.5-32b",
        Layout(world_size=1024, tensor=4, pipeline=2),
        InferLayout(engines=1024, tensor=4),
    ),
    "235B-A22B, 256 x 16": (
        "qwen3-235b-a22b",
        Layout(world_size=256, tensor=4, pipeline=8, expert=16, first_stage_layers=11, last_stage_layers=11),
        InferLayout(engines=16, tensor=8),
    ),
    "235B-A22B, 256 x 1,024, whole experts": (
        "qwen3-235b-a22b",
        Layout(world_size=256, tensor=4, pipeline=8, expert=16, first_stage_layers=11, last_stage_layers=11),
        InferLayout(engines=1024, tensor=8, expert_parallel=True),
    ),
    "235B-A22B, 256 x 16, whole experts": (
        "qwen3-235b-a22b",
        Layout(world_size=256, tensor=4, pipeline=8, expert=16, first_stage_layers=11, last_stage_layers=11),
        InferLayout(engines=16, tensor=8, expert_parallel=True),
    ),
}
PLAIN_SLICES = 6_000_000
"""Of more the plain plan is not made."""


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this process, and the result."""
    begin = time.process_time()
    found = call()
    return round(time.process_time() - begin, 3), found


def communicators(made: ReshardPlan, engines: Iterable[int]) -> int:
    """Of the learner that holds most, if learners send to each of these engines."""
    found = Counter(rank for engine in engines for rank in made.learners(engine))
    return max(found.values())


def compare_ways(model: ModelShape, train: Layout, infer: InferLayout, made: ReshardPlan) -> dict[str, Any]:
    """Learners send to every engine, or to those at the heads of trees: what they hold, and the planned seconds of a sync."""
    hardware = Hardware(gpu=GPUS["H100"], nodes=-(-(train.world_size + infer.engines * infer.workers) // 8))
    seating = Seating(made.sources.trees(infer.engines))
    arrange_s, _ = timed(lambda: seating.arrange(dict.fromkeys(range(infer.engines), 0)))
    seconds = partial(
        sync_seconds,
        made.bytes_moved / infer.engines,
        model,
        infer,
        learners=train.world_size,
        cuts=train.tensor,
        hardware=hardware,
        bucket_bytes=BUCKET_BYTES,
    )
    return {
        "arrange_s": arrange_s,
        "communicators_of_a_learner": {
            "to every engine": communicators(made, range(infer.engines)),
            "trees": communicators(made, seating.heads()),
        },
        "planned_sync_s": {"to every engine": seconds(), "trees": seconds(direct=len(seating.heads()))},
    }


def gather_seconds(model: ModelShape, train: Layout) -> float:
    """CPU seconds of rank 0 for finding what all ranks hold, among `GATHERING` ranks over gloo."""
    context = multiprocessing.get_context("spawn")
    _served, port = open_store(HOST, TIMEOUT_S)
    found = context.Queue()
    ranks = [
        context.Process(target=gather_as_rank, args=(rank, port, model, train, found)) for rank in range(GATHERING)
    ]
    for process in ranks:
        process.start()
    seconds = found.get(timeout=TIMEOUT_S)
    for process in ranks:
        process.join()
    return seconds


def gather_as_rank(rank: int, port: int, model: ModelShape, train: Layout, found: Any) -> None:
    """One rank of `gather_seconds`: its own boxes are there, as in a run."""
    backend.install()  # before the first import of Megatron
    from mgrpo.policy.parameters import gather_held

    dist.init_process_group("gloo", store=connect_store(HOST, port, TIMEOUT_S), rank=rank, world_size=GATHERING)
    boxes = [piece.box for own in local_parameters(model, train, rank).values() for piece in own.pieces]
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()
    seconds, _ = timed(lambda: gather_held(boxes, Tensors(hf_tensors(model)), group))
    if rank == 0:
        found.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def compare_plans(model: ModelShape, train: Layout, infer: InferLayout) -> dict[str, Any]:
    """Seconds and bytes of both plans."""
    from tests.unit.sync import plan_oracle

    holdings = training_holdings(model, train)
    plan_s, made = timed(lambda: plan(model, train, infer, holdings=holdings))
    own_s, own = timed(
        lambda: [made.boxes(places) for workers in made.outgoing(0).values() for places in workers.values()]
    )
    sender = Sender(
        [(Box("none", (0,), (1,)), torch.zeros(1))],
        holdings=holdings,
        model=model,
        train_layout=train,
        infer_layout=infer,
        rank=0,
        dtype=torch.bfloat16,
        store=None,  # type: ignore[arg-type]
        host=HOST,
        port=0,
        bucket_bytes=BUCKET_BYTES,
        timeout_s=TIMEOUT_S,
    )
    first_s, invitation = timed(lambda: json.dumps(sender.invitation(0)))
    others_s, _ = timed(lambda: [json.dumps(sender.invitation(engine)) for engine in range(1, infer.engines)])
    gathered_s = gather_seconds(model, train)
    loads = [0] * train.world_size
    record: dict[str, Any] = {
        "slices": made.num_slices,
        "gigabytes": made.bytes_moved / 1e9,
        "tables": {
            "gather_held_s": gathered_s,
            "plan_s": plan_s,
            "own_part_s": own_s,
            "first_invitation_s": first_s,
            "other_invitations_s": others_s,
            "rank_0_s": round(gathered_s + plan_s + own_s + first_s + others_s, 3),
            "own_slices": sum(map(len, own)),
            "invitation_bytes": len(invitation),
        },
    }
    for _, _, rank, boxes in made.transfers if made.num_slices < PLAIN_SLICES else ():
        loads[rank] += sum(box.size for box in boxes)
    record["ways"] = compare_ways(model, train, infer, made)
    if made.num_slices >= PLAIN_SLICES:
        return record
    record["tables"]["busiest_over_mean"] = max(loads) * len(loads) / sum(loads)
    boxes_s, held = timed(lambda: training_boxes(model, train))
    workers = engine_boxes(model, infer)
    plain_s, plain = timed(lambda: plan_oracle.reshard(held, workers * infer.engines))
    first = plain[: infer.workers]
    text = json.dumps([{rank: [astuple(box) for box in boxes] for rank, boxes in own.items()} for own in first])
    sent = [0] * train.world_size
    for incoming in plain:
        for rank, boxes in incoming.items():
            sent[rank] += sum(box.size for box in boxes)
    record["plain"] = {
        "boxes_of_all_ranks_s": boxes_s,
        "plan_s": plain_s,
        "invitation_bytes": len(text),
        "busiest_over_mean": max(sent) * len(sent) / sum(sent),
    }
    record["times faster"] = plain_s / plan_s
    return record


def bench_plans(out: Path) -> None:
    """Print and write what `compare_plans` finds for each of `PLANS`."""
    sys.path.insert(0, str(ROOT))
    records = {}
    for name, (model, train, infer) in PLANS.items():
        record = records[name] = compare_plans(shape_of(shipped_configs()[model]), train, infer)
        print(f"{name}: {record['slices']:,} slices")
        for kind in ("plain", "tables"):
            if kind in record:
                print("  " + kind + ": " + ", ".join(f"{key} {value:,.6g}" for key, value in record[kind].items()))
        for key in ("communicators_of_a_learner", "planned_sync_s"):
            found = record["ways"][key]
            print(f"  {key}: " + ", ".join(f"{way} {value:,.4g}" for way, value in found.items()))
        if "times faster" in record:
            print(f"  the plan is made {record['times faster']:.0f} times faster")
    text = {
        "protocol": "CPU seconds of rank 0, whose sum is `rank_0_s`: an invitation for every engine, and `gather_held` among "
        f"{GATHERING} ranks over gloo that hold what the first of the run do; the exchange among all of them was not timed. `plain` is the plan of every engine box by box, as all processes would make it. "
        "`ways`: communicators counted; seconds as `mgrpo plan` says on H100 with a 400 Gb/s card each, not measured.",
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "plans": records,
    }
    out.write_text(json.dumps(text, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--bucket-mb", type=int, default=256, help="weight_sync_bucket_mb")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "sync-cpu.json")
    parser.add_argument("--plans", action="store_true", help="the plans of large runs instead")
    args = parser.parse_args()
    if args.plans:
        bench_plans(ROOT / "benchmarks" / "sync-plan.json")
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    records = {}
    for name in args.cases:
        record = records[name] = measure(CASES[name], args)
        print(f"{record['what']}: {record['megabytes']:.0f} MB")
        for transport in TRANSPORTS:
            found = record[transport]
            rate = record["megabytes"] / 1e3 / found["seconds_median"]
            print(
                f"  {transport:14s} {found['seconds_median']:7.3f} s  {rate:5.1f} GB/s  CPU {found['cpu_seconds_median']:.2f} s"
                f"   {min(found['seconds']):.3f} to {max(found['seconds']):.3f}"
            )
        print(f"  {record['times faster']:.1f} times faster")
    text = {
        "protocol": PROTOCOL.format(rounds=args.rounds - 1),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        },
        "weight_sync_bucket_mb": args.bucket_mb,
        "cases": records,
    }
    args.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
