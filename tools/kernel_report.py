"""The compiler's output for the CUDA kernels: registers, stack, spills, shared memory and wide loads. Needs no GPU.

    python tools/kernel_report.py --arch 80 90

Needs nvcc and cuobjdump (in a CUDA toolkit; or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm). Prints a Markdown
table, the one in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESOURCES = re.compile(
    r"Compiling entry function '(\S+)'.*\n.*\n\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill "
    r"loads\n.*?Used (\d+) registers[^\n]*?(?:, (\d+) bytes smem)?\n"
)


def output_of(*command: str) -> tuple[str, str]:
    """stdout and stderr of a tool that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout, done.stderr


def report(source: Path, arch: str, folder: Path) -> list[tuple[str, ...]]:
    """One row per kernel: its name, then its figures."""
    cubin = folder / f"{source.stem}.{arch}.cubin"
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    flags = ("-O3", "-std=c++17", target, "-Xptxas", "-v", f"-I{ROOT / 'csrc'}", "-cubin", "-o", str(cubin))
    _, log = output_of("nvcc", *flags, str(source))
    listing, _ = output_of("cuobjdump", "-sass", str(cubin))
    sass = {part.split("\n", 1)[0].strip(): part for part in listing.split("Function : ")[1:]}
    rows = []
    for symbol, stack, stores, loads, registers, shared in RESOURCES.findall(log):
        name = output_of("c++filt", symbol)[0].strip().split("(anonymous namespace)::")[1].split("(")[0]
        count = [
            len(re.findall(pattern, sass[symbol])) for pattern in (r"\bLDG\S*\.128", r"\bSTG\S*\.128", r"\b(LDL|STL)\b")
        ]
        rows.append(
            (name, f"sm_{arch}", registers, stack, str(int(stores) + int(loads)), shared or "0", *map(str, count))
        )
    return sorted(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["80", "90"])
    args = parser.parse_args()
    for tool in ("nvcc", "cuobjdump", "nvdisasm"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is not on PATH")
    header = (
        "kernel",
        "for",
        "registers",
        "stack B",
        "spills B",
        "shared B",
        "16 B loads",
        "16 B stores",
        "local loads",
    )
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted((ROOT / "csrc" / "core").glob("*.cu")):
            for arch in args.arch:
                for row in report(source, arch, Path(folder)):
                    print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
