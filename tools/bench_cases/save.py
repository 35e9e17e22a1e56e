"""Seconds for which training waits for a rank's part of a training state."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mgrpo.checkpoint.saver import THREADS, Saver
from mgrpo.checkpoint.shard import Part
from mgrpo.models.placement.boxes import Box

REPEATS = 3
PACKAGES = ("mgrpo", "torch")
PROTOCOL = (
    "One file at a time: write and hash one file after another while training waits. Several files: the same in the saver's threads. In "
    "the background: training waits for the copy to host memory alone; written behind: that state is complete. The best of {repeats} "
    "rounds, which alternate; every save has a folder of its own. On a CPU the copy is one within host memory; with a GPU the tensors "
    "are on it."
)
TENSORS = 64
WAYS: dict[str, dict[str, Any]] = {
    "one file at a time": {"threads": 1},
    "several files": {"threads": THREADS},
    "in the background": {"threads": THREADS, "asynchronous": True},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=1, help="of this rank's part")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary one by default")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = int(args.gib * 2**30 / 4 / TENSORS)
    parts = [Part("master", Box(f"w{i}", (0,), (length,)), torch.randn(length, device=device)) for i in range(TENSORS)]
    shapes = {"master": {part.box.name: part.box.shape for part in parts}}
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        states, file_bytes = Path(name) / "states", int(args.gib * 2**30 / 4) + 1
        savers = {way: Saver(states, 0, 1, keep_last_n=1, file_bytes=file_bytes, **own) for way, own in WAYS.items()}
        for number in range(args.repeats + 1):
            for way, saver in savers.items():
                shutil.rmtree(states, ignore_errors=True)
                began = time.perf_counter()
                saver.save(1, parts, {}, shapes, f"a{number}")
                waited = time.perf_counter() - began
                saver.wait()
                if number:  # the first round makes the memory of the copies
                    seconds.setdefault(way, []).append(waited)
                    if saver.asynchronous:
                        seconds.setdefault("written behind", []).append(time.perf_counter() - began)
    best = {way: min(own) for way, own in seconds.items()}
    baseline = best["one file at a time"]
    return {
        "gib": args.gib,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "rows": [{"way": way, "seconds": own, "ratio": own / baseline} for way, own in best.items()],
    }
