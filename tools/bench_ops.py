"""Time of token_logprobs, forward and backward, against what one writes in PyTorch; all in one process on one input.

    python tools/bench_ops.py --device cpu --tokens 1024 --vocab 32000
    python tools/bench_ops.py --device cuda --tokens 16384 --vocab 151936

On the CPU the figure is CPU seconds of the process (a shared machine stretches wall time, not these); on CUDA it is
the time between events. Every method runs in turn, --repeat rounds; the least of its rounds counts. Writes
benchmarks/ops-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mgrpo.ops import build_info, token_logprobs

Scores = tuple[Tensor, Tensor | None]
Method = Callable[[Tensor, Tensor, bool], Scores]


def by_log_softmax(logits: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
    logp = torch.log_softmax(logits.float(), dim=-1)
    entropy = -(logp.exp() * logp).sum(-1) if with_entropy else None
    return logp.gather(1, targets[:, None])[:, 0], entropy


def by_logsumexp(logits: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
    x = logits.float()
    lse = torch.logsumexp(x, dim=-1)
    entropy = lse - (torch.softmax(x, dim=-1) * x).sum(-1) if with_entropy else None
    return x.gather(1, targets[:, None])[:, 0] - lse, entropy


def ours(inplace: bool) -> Method:
    return lambda logits, targets, with_entropy: token_logprobs(
        logits, targets, with_entropy=with_entropy, inplace=inplace
    )


METHODS: dict[str, Method] = {
    "log_softmax + gather": by_log_softmax,
    "gather - logsumexp": by_logsumexp,
    "mgrpo, new buffer": ours(inplace=False),
    "mgrpo, in place": ours(inplace=True),
}
BASELINE = "log_softmax + gather"


def seconds(device: str, call: Callable[[], object]) -> float:
    """CPU seconds of the process, or seconds between two CUDA events."""
    if device == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(method: Method, source: Tensor, targets: Tensor, with_entropy: bool, device: str) -> tuple[float, float]:
    """Forward and backward seconds of one run. The copy stands for the LM head's output, which is nobody's leaf."""
    g_logprobs = torch.full(targets.shape, 0.5, device=device)
    g_entropy = torch.full(targets.shape, 1e-3, device=device)
    logits = source.detach().clone().requires_grad_().view_as(source)
    results: list[Scores] = []
    forward = seconds(device, lambda: results.append(method(logits, targets, with_entropy)))
    logprobs, entropy = results.pop()
    outputs, cotangents = (logprobs, entropy), (g_logprobs, g_entropy)
    used = 2 if with_entropy else 1
    backward = seconds(device, lambda: torch.autograd.grad(outputs[:used], logits, cotangents[:used]))
    return forward, backward


def run(args: argparse.Namespace, dtype: torch.dtype, with_entropy: bool) -> list[dict]:
    """One row of the table for each method, methods taking turns."""
    torch.manual_seed(0)
    source = torch.empty(args.tokens, args.vocab, dtype=dtype, device=args.device).normal_(std=3)
    targets = torch.randint(0, args.vocab, (args.tokens,), device=args.device)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for repeat in range(args.repeat + 1):
        for name, method in METHODS.items():
            timing = measure(method, source, targets, with_entropy, args.device)
            if repeat:  # the first round pays for page faults and kernel loading
                rounds[name].append(timing)
    best = {name: min(timings, key=sum) for name, timings in rounds.items()}
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "entropy": with_entropy,
            "method": name,
            "forward_ms": 1e3 * forward,
            "backward_ms": 1e3 * backward,
            "gb_per_s": 3 * source.numel() * source.element_size() / (forward + backward) / 1e9,
            "speedup": sum(best[BASELINE]) / (forward + backward),
        }
        for name, (forward, backward) in best.items()
    ]


def copy_rate(args: argparse.Namespace) -> float:
    """GB/s of a plain copy, read and write counted: what no method of one read and one write can beat."""
    source = torch.ones(args.tokens, args.vocab, device=args.device)
    target = torch.empty_like(source)
    least = min(seconds(args.device, lambda: target.copy_(source)) for _ in range(args.repeat + 1))
    return 2 * source.numel() * source.element_size() / least / 1e9


def machine(device: str) -> dict:
    """Where and with what the figures were taken."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else platform.processor()
    counts = {"cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"device": name, **counts, "torch": torch.__version__, **build_info()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder of the JSON file")
    args = parser.parse_args()

    where = {**machine(args.device), "copy_gb_per_s": copy_rate(args)}
    unit = "CPU ms" if args.device == "cpu" else "ms"
    print(f"{args.tokens} tokens x {args.vocab} columns on {where['device']}, torch {where['torch']}; {unit}")
    print(
        f"a plain copy moves {where['copy_gb_per_s']:.1f} GB/s; GB/s below: three passes over the logits by the total"
    )
    print(
        f"{'dtype':9s} {'entropy':8s} {'method':22s} {'forward':>9s} {'backward':>9s} {'total':>9s} {'GB/s':>7s} {'speedup':>8s}"
    )
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for with_entropy in (False, True):
            for row in run(args, dtype, with_entropy):
                rows.append(row)
                total = row["forward_ms"] + row["backward_ms"]
                print(
                    f"{row['dtype']:9s} {row['entropy']!s:8s} {row['method']:22s} {row['forward_ms']:9.1f} "
                    f"{row['backward_ms']:9.1f} {total:9.1f} {row['gb_per_s']:7.1f} {row['speedup']:7.1f}x",
                    flush=True,
                )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"ops-{args.device}.json"
    protocol = f"{unit}, least of {args.repeat} interleaved rounds, speedup over {BASELINE}"
    report = {"protocol": protocol, "machine": where, "tokens": args.tokens, "vocab": args.vocab, "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
