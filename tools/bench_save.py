"""Seconds for which training waits for a rank's part of a training state.

    OMP_NUM_THREADS=1 python tools/bench_save.py [--gib 1] [--rounds 3] [--folder FOLDER]

"one file at a time" is what a save was: write and hash one file after another while training waits. "several files" does so in
`saver.THREADS` threads, "in the background" waits for the copy to host memory alone, and "written behind" is when that state is
complete. Each is the best of the rounds, which alternate; every save has a folder of its own, deleted before the next. On a CPU the copy
is one within host memory; with a GPU the tensors are on it, and the copy goes to page-locked memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

import torch

from mgrpo.checkpoint.saver import THREADS, Saver
from mgrpo.checkpoint.shard import Part
from mgrpo.models.placement.boxes import Box

ROOT = Path(__file__).resolve().parent.parent
TENSORS = 64
WAYS = {
    "one file at a time": {"threads": 1},
    "several files": {"threads": THREADS},
    "in the background": {"threads": THREADS, "asynchronous": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1, help="of this rank's part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary one by default")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "save.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = int(args.gib * 2**30 / 4 / TENSORS)
    parts = [Part("master", Box(f"w{i}", (0,), (length,)), torch.randn(length, device=device)) for i in range(TENSORS)]
    shapes = {"master": {part.box.name: part.box.shape for part in parts}}
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        savers = {
            name: Saver(Path(folder) / "states", 0, 1, keep_last_n=1, file_bytes=int(args.gib * 2**30 / 4) + 1, **way)
            for name, way in WAYS.items()
        }
        for number in range(args.rounds + 1):
            for name, saver in savers.items():
                shutil.rmtree(Path(folder) / "states", ignore_errors=True)
                began = time.perf_counter()
                saver.save(1, parts, {}, shapes, f"a{number}")
                waited = time.perf_counter() - began
                saver.wait()
                if number:  # the first round makes the memory of the copies
                    seconds.setdefault(name, []).append(waited)
                    if saver.asynchronous:
                        seconds.setdefault("written behind", []).append(time.perf_counter() - began)
    best = {name: min(own) for name, own in seconds.items()}
    baseline = best["one file at a time"]
    for name, own in best.items():
        print(f"{name:20} {own:7.3f} s  {own / baseline:5.2f} of the baseline")
    args.out.write_text(
        json.dumps(
            {
                "gib": args.gib,
                "device": torch.cuda.get_device_name()
                if device == "cuda"
                else platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "torch": torch.__version__,
                "seconds": best,
                "ratios": {name: own / baseline for name, own in best.items()},
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
