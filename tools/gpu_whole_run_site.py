"""Where tools/gpu_whole_run.py keeps things between its calls, and how the pieces that were carried are put together there."""

from __future__ import annotations

import compileall
import hashlib
import json
import lzma
import os
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import gpu_check
import tomllib
from gpu_carry import SUMS
from gpu_check import Outcome, Place

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Site:
    """Where things are kept between calls."""

    folder: Path
    flags: tuple[str, ...]
    """Settings for engine and runs."""
    stage: str = ""
    """The one that is running."""

    @property
    def packages(self) -> Path:
        """The site-packages of what was carried."""
        return self.folder / "site"

    @property
    def runs(self) -> Path:
        """The runs' folders."""
        return self.folder / "runs"

    @property
    def logs(self) -> Path:
        """The output of every process, a file for each stage."""
        return self.folder / "logs"

    @property
    def parts(self) -> Path:
        """The outcome of every stage, a file for each: several may end at the same time, in one call or in two."""
        return self.folder / "parts"

    def keep(self, stage: str, outcome: str) -> None:
        """Write a stage's outcome at once: another call may read it meanwhile."""
        self.parts.mkdir(exist_ok=True)
        new = self.parts / f"{stage}.new"
        new.write_text(outcome)
        new.replace(self.parts / f"{stage}.json")

    def run(self, command: Sequence[str | Path], place: Place) -> tuple[int | None, str]:
        """As `gpu_check.run`; what it prints is kept."""
        status, output = gpu_check.run(command, place)
        self.logs.mkdir(exist_ok=True)
        with (self.logs / f"{self.stage}.txt").open("a") as file:
            file.write(f"--- {' '.join(map(str, command))}\n{output}\n--- ended with {status}\n\n")
        return status, output


def join(place: Place, site: Site) -> Outcome:
    """Unpack the archives of which `pieces` has every piece, and make mgrpo known to vLLM, which looks for its entry point.

    Failed if a piece is damaged or no archive is complete; those whose pieces are still to come are named.
    """
    pieces = site.folder / "pieces"
    if place.device == "cpu" and not pieces.exists():
        return Outcome(status="skipped", note="nothing was carried: the packages are installed")
    sums: dict[str, list[dict[str, Any]]] = json.loads((pieces / SUMS).read_text())
    joined, incomplete, is_damaged, is_new = [], [], False, False
    for archive, records in sums.items():
        done = site.packages / f"{archive}.joined"
        if done.exists():
            joined.append(archive)
            continue
        missing = [f"{record['name']} is not here" for record in records if not (pieces / record["name"]).is_file()]
        damaged = [problem for record in records if (problem := damage(pieces / record["name"], record))]
        is_damaged |= bool(damaged)
        if missing or damaged:
            incomplete.append(f"{archive} is not complete yet: {', '.join(missing + damaged)}")
            continue
        stream: Any = Joined([pieces / record["name"] for record in records])
        with lzma.open(stream) as packed, tarfile.open(fileobj=packed, mode="r|") as content:
            content.extractall(site.packages, filter="data")
        done.touch()
        joined.append(archive)
        is_new = True
    if is_new:
        shutil.copyfile(ROOT / "tools" / "gpu_site.py", site.packages / "sitecustomize.py")
        introduce(site.packages)
        # Every stage imports vLLM in several processes.
        compileall.compile_dir(site.packages, quiet=2, workers=0)
    status: Literal["passed", "failed"] = "passed" if joined and not is_damaged else "failed"
    return Outcome(status=status, note="; ".join([*joined, *incomplete]))


def damage(piece: Path, record: dict[str, Any]) -> str:
    """Difference between a piece and its record, in words; "" if there is none."""
    if not piece.is_file() or hashlib.sha256(piece.read_bytes()).hexdigest() == record["sha256"]:
        return ""
    return f"{piece.name} is damaged ({piece.stat().st_size} bytes of {record['bytes']})"


class Joined:
    """The files one after the other, to read from."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.rest = list(files)
        self.file: BinaryIO | None = None

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes, a file's rest if it is below 0; b"" after the last."""
        while True:
            if self.file is not None and (data := self.file.read(size)):
                return data
            if self.file is not None:
                self.file.close()
            if not self.rest:
                return b""
            self.file = self.rest.pop(0).open("rb")


def introduce(packages: Path) -> None:
    """Write what an installation of this repository would say of itself: its version and its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = packages / f"mgrpo-{project['version']}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mgrpo\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items())
        for group, names in project["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("\n".join(groups))


def environment(site: Site, device: str) -> dict[str, str]:
    """The environment of every stage: where packages are, and which GPU."""
    paths = [str(ROOT), str(site.packages), os.environ.get("PYTHONPATH", "")]
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")} if device == "cuda" else {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "", **visible}
