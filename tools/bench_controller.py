"""The cost of a step on rank 0 between scoring and training: planning the packs, their bytes, sending them.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python tools/bench_controller.py [--sizes 4096x8192 65536x32768] [--dp 128]

"slices" is mgrpo: rank 0 plans with lengths, each data-parallel rank receives its samples, 9 bytes for a response token, and lays
its packs out itself. "everything to all" is what it replaced: rank 0 lays out all packs, 24 bytes a token, joins their arrays and
broadcasts them to every learner. Both use the same planner and the same samples, whose lengths vary (log-normal) and whose arrays
are stretches of one array of 300 MB: they take no memory of their own. Where the baseline's bytes of all data-parallel ranks would
exceed `--memory_gib`, those of the first few are made, and the seconds are multiplied; "measured_ranks" says of how many. Sending
is measured between `--ranks` processes of this machine over gloo, in MB that leave rank 0 per second; what leaves it with `dp`
learners is computed: each slice but its own once, or a whole copy for each of the log2(dp) neighbours of the root of gloo's
broadcast tree. "slices from one thread" is how rank 0 sent before it had several senders; on a machine with few processors the receivers take most
of them. Planning, arrays and layout are CPU seconds of one process; sending is wall time, the best of ten rounds in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from mgrpo import packing
from mgrpo.parallel.broadcast import SENDERS
from mgrpo.types import PackedBatch, TrainSample

ROOT = Path(__file__).resolve().parent.parent
GROUP_SIZE, PROMPT_TOKENS = 8, 512
SEND_ROUNDS = 10
POOL_TOKENS = 1 << 25
"""Much more than a processor's caches hold."""
BEFORE, AFTER, ONE_SENDER = "everything to all", "slices", "slices from one thread"
BASELINE_BYTES = 4 * 24
"""Memory for a token on rank 0 while the baseline makes its bytes: packs, joined arrays and two copies of them."""

Plan = list[list[list[list[list[int]]]]]


def made_up_samples(count: int, mean_tokens: int) -> tuple[list[TrainSample], int]:
    """Groups of completions, and the tokens of the longest sample."""
    random = np.random.default_rng(0)
    prompt_tokens = min(PROMPT_TOKENS, mean_tokens // 2)
    mean, limit = mean_tokens - prompt_tokens, 4 * mean_tokens
    lengths = np.clip(random.lognormal(math.log(mean) - 0.18, 0.6, count), 2, limit).astype(int).tolist()
    size = max(POOL_TOKENS if count * mean_tokens > POOL_TOKENS else 0, 2 * limit)
    tokens = random.integers(0, 150_000, size, dtype=np.int32)
    loss_mask, logprobs = np.ones(size, np.bool_), -random.random(size, dtype=np.float32)
    starts = random.integers(0, size - limit, count).tolist()
    prompts = [tokens[start : start + prompt_tokens] for start in starts[::GROUP_SIZE]]
    samples = [
        TrainSample(
            prompt_tokens=prompts[number // GROUP_SIZE],
            tokens=tokens[start : start + length],
            loss_mask=loss_mask[start : start + length],
            rollout_logprobs=logprobs[start : start + length],
            advantage=number % 7 - 3.0,
            group=number // GROUP_SIZE,
        )
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    return samples, prompt_tokens + max(lengths)


def joined(packs: list[PackedBatch]) -> dict[str, np.ndarray]:
    """The baseline's arrays: every field of every pack, end to end; it had no ages, no teachers and no experts."""
    sizes = [[len(p.tokens), len(p.cu_seqlens) - 1, len(p.rows), len(p.response_cu_seqlens) - 1] for p in packs]
    later = ("ages", "kept", "teachers", "taught", "routes")
    names = [field.name for field in dataclasses.fields(PackedBatch) if field.name not in later]
    return {
        "sizes": np.array(sizes),
        **{name: np.concatenate([getattr(pack, name) for pack in packs]) for name in names},
    }


def one_message(arrays: dict[str, np.ndarray]) -> bytes:
    """The baseline's copies on the way: the bytes of each array, all of them behind each other, and with the index."""
    index = json.dumps([[name, str(array.dtype), array.shape] for name, array in arrays.items()]).encode()
    return index + b"".join(array.tobytes() for array in arrays.values())


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result and its CPU seconds."""
    start = time.process_time()
    return work(), time.process_time() - start


def laid_out(samples: list[TrainSample], plan: Plan) -> list[PackedBatch]:
    return [
        packing.assemble(samples, documents) for ranks in plan for micro_batches in ranks for documents in micro_batches
    ]


def measure_before(samples: list[TrainSample], plan: Plan) -> dict[str, float]:
    """Rank 0 lays out and joins the packs; learners take views."""
    packs, layout_s = timed(lambda: laid_out(samples, plan))
    message, arrays_s = timed(lambda: one_message(joined(packs)))
    return {"layout_s": layout_s, "arrays_s": arrays_s, "bytes": len(message), "index_bytes": 0, "learner_s": 0.0}


def measure_after(samples: list[TrainSample], plan: Plan) -> dict[str, float]:
    """Rank 0 fills slices; learners lay out their own."""
    padding = {"multiple_of": 1, "document_multiple_of": 1}
    (index, slices), index_s = timed(lambda: packing.to_slices(samples, plan, **padding))
    # As when they are sent: into a few buffers, which are made for every step.
    buffers = [np.empty(max(part.num_bytes for part in slices), np.uint8) for _ in range(SENDERS)]
    _, fill_s = timed(
        lambda: [part.fill(buffers[number % SENDERS][: part.num_bytes]) for number, part in enumerate(slices)]
    )
    data = slices[0].filled()
    received, learner_s = timed(lambda: packing.from_slice(index, data))
    own = laid_out(samples, [[ranks[0]] for ranks in plan])
    for pack, expected in zip((pack for row in received for pack in row), own, strict=True):
        for field in dataclasses.fields(PackedBatch):
            left, right = getattr(pack, field.name), getattr(expected, field.name)
            is_equal = left is right or (left.dtype == right.dtype and np.array_equal(left, right))
            assert is_equal, f"{field.name} differs"
    return {
        "layout_s": 0.0,
        "arrays_s": index_s + fill_s,
        "bytes": sum(part.num_bytes for part in slices),
        "index_bytes": sum(array.nbytes for array in index.values()),
        "learner_s": learner_s,
    }


METHODS = {BEFORE: measure_before, AFTER: measure_after}


def measure(count: int, mean_tokens: int, *, dp: int, memory_gib: float, rates: dict[str, float]) -> list[dict]:
    """The figures of both methods at one size."""
    samples, longest = made_up_samples(count, mean_tokens)
    tokens = sum(len(sample.prompt_tokens) + len(sample.tokens) for sample in samples)
    plan, plan_s = timed(
        lambda: packing.plan_step(
            samples, pack_length=max(longest, 2**15), dp=dp, num_mini_batches=1, multiple_of=1, share_prompts=False
        )
    )
    rows = []
    for method, work in METHODS.items():
        fitting = int(dp * memory_gib * 2**30 / (BASELINE_BYTES * tokens))
        ranks = max(1, min(dp, fitting)) if method == BEFORE else dp
        found = work(samples, [row[:ranks] for row in plan])
        scale = dp / ranks
        num_bytes = found["bytes"] * scale
        if method == AFTER:
            sent, received = num_bytes * (dp - 1) / dp, num_bytes / dp + found["index_bytes"]
        else:
            sent, received = num_bytes * math.ceil(math.log2(dp)), num_bytes
        row = {
            "samples": count,
            "tokens": tokens,
            "dp": dp,
            "method": method,
            "measured_ranks": ranks,
            "plan_s": plan_s,
            "layout_s": found["layout_s"] * scale,
            "arrays_s": found["arrays_s"] * scale,
            "send_s": sent / 1e6 / rates[method],
            "learner_s": found["learner_s"],
            "bytes": num_bytes,
            "bytes_a_token": num_bytes / tokens,
            "bytes_from_rank_0": sent,
            "bytes_to_a_learner": received,
        }
        row["rank_0_s"] = row["plan_s"] + row["layout_s"] + row["arrays_s"] + row["send_s"]
        rows.append(row)
    return rows


class Constant:
    """A slice for the measurement of sending."""

    def __init__(self, value: int, num_bytes: int) -> None:
        self.value, self.num_bytes = value, num_bytes

    def fill(self, data: np.ndarray) -> None:
        data[:] = self.value


def send(rank: int, ranks: int, store: str, num_bytes: int, results: Any) -> None:
    """MB that leave rank 0 per second, by method: a process of the measurement."""
    import torch
    import torch.distributed as dist

    from mgrpo.layout import Layout
    from mgrpo.parallel import broadcast as channels

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    channel, layout = channels.BroadcastChannel(timeout_s=60), Layout(world_size=ranks)
    slices = [Constant(number, num_bytes) for number in range(ranks)] if rank == 0 else []
    ready = np.zeros(num_bytes, np.uint8)

    def broadcast() -> None:
        # As it was: the sender copies into a buffer, the receivers copy out of theirs.
        data = ready.tobytes() if rank == 0 else b""
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(num_bytes, dtype=torch.uint8)
        )
        dist.broadcast(buffer, 0, group=channel.group)
        if rank:
            buffer.numpy().tobytes()

    def scatter() -> None:
        assert channel.scatter(layout, slices)[0] == rank

    def scatter_from_one_thread() -> None:
        with patch.object(channels, "SENDERS", 1):
            scatter()

    works = {
        BEFORE: (broadcast, math.ceil(math.log2(ranks)) * num_bytes),
        ONE_SENDER: (scatter_from_one_thread, (ranks - 1) * num_bytes),
        AFTER: (scatter, (ranks - 1) * num_bytes),
    }
    best = dict.fromkeys(works, math.inf)
    # In turns, so that what else the machine does meets both.
    for _ in range(SEND_ROUNDS):
        for method, (work, _) in works.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            dist.barrier()
            best[method] = min(best[method], time.perf_counter() - start)
    if rank == 0:
        results.put({method: sent / 1e6 / best[method] for method, (_, sent) in works.items()})
    dist.destroy_process_group()


def measure_sending(ranks: int, num_bytes: int) -> dict[str, float]:
    """MB that leave rank 0 per second, by method."""
    import torch.multiprocessing as mp

    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(send, (ranks, f"{folder}/store", num_bytes, results), nprocs=ranks)
    found: dict[str, float] = results.get()
    return found


def cpu_model() -> str:
    """Name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    head = (
        f"{'samples':>8} {'Mtokens':>8} {'method':<18}{'plan s':>8}{'layout s':>9}{'arrays s':>9}{'send s':>8}{'rank 0 s':>9}"
        f"{'learner s':>10}{'B/token':>8}{'from rank 0 GB':>15}{'to a learner MB':>16}{'ranks':>6}"
    )
    lines = [
        f"{row['samples']:>8} {row['tokens'] / 1e6:>8.1f} {row['method']:<18}{row['plan_s']:>8.2f}{row['layout_s']:>9.2f}"
        f"{row['arrays_s']:>9.2f}{row['send_s']:>8.2f}{row['rank_0_s']:>9.2f}{row['learner_s']:>10.3f}{row['bytes_a_token']:>8.1f}"
        f"{row['bytes_from_rank_0'] / 1e9:>15.2f}{row['bytes_to_a_learner'] / 1e6:>16.1f}{row['measured_ranks']:>6}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", default=["4096x8192", "65536x10000", "65536x32768"], help="samples x mean tokens"
    )
    parser.add_argument("--dp", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=4, help="processes that sending is measured between")
    parser.add_argument("--send_mb", type=int, default=64, help="of each slice that is sent, and of the broadcast")
    parser.add_argument("--memory_gib", type=float, default=7.0, help="most that the baseline may take")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "controller.json")
    args = parser.parse_args()

    load = os.getloadavg()[0]
    rates = measure_sending(args.ranks, args.send_mb << 20)
    rows = []
    for size in args.sizes:
        count, mean_tokens = map(int, size.split("x"))
        rows += measure(count, mean_tokens, dp=args.dp, memory_gib=args.memory_gib, rates=rates)
    print(table(rows))
    print(f"sending from several threads: {rates[AFTER] / rates[ONE_SENDER]:.2f} times the rate of one")
    report = {
        "protocol": " ".join((__doc__ or "").split("\n\n", 2)[2].split()),
        "machine": {"cpu": cpu_model(), "cpus": os.cpu_count(), "load_before": load},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("mgrpo", "numpy", "torch")},
        "sending": {
            "ranks": args.ranks,
            "slice_mb": args.send_mb,
            "mb_per_s_from_rank_0": rates,
        },
        "memory_gib": args.memory_gib,
        "results": rows,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwrote {args.output}")


if __name__ == "__main__":
    main()
