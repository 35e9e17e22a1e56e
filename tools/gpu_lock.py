"""requirements/gpu.lock: every package that pip resolves for requirements/gpu.txt, by each of the given interpreters.

    python tools/gpu_lock.py python3.11 python3.12 python3.13 > requirements/gpu.lock

Nothing is installed and no GPU is needed, but each interpreter needs pip, and some packages are downloaded for their metadata.
Packages that cpu.txt has too get its versions: those are what the tests run with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
UNLIKE_CPU = {"apache-tvm-ffi": "vllm's GPU build asks for exactly 0.1.11"}
"""Packages whose version differs from cpu.txt's, and why."""
HEAD = """\
# Constraints for gpu.txt, so that nodes that are installed on different days are equal: what pip resolves for it on Linux
# x86_64 with Python {pythons}. Made by tools/gpu_lock.py; a change of gpu.txt or cpu.txt needs it made anew."""

Versions = dict[str, str]


def resolve(python: str) -> tuple[str, Versions]:
    """The interpreter's version as markers have it, and the version of each package that it would install."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        lines = (REQUIREMENTS / "cpu.txt").read_text().splitlines()
        constraints.write_text(
            "\n".join(line for line in lines if canonicalize_name(line.partition("==")[0]) not in UNLIKE_CPU)
        )
        subprocess.run(
            [
                *(python, "-m", "pip", "--quiet", "--disable-pip-version-check"),
                *("install", "--dry-run", "--ignore-installed", "--report", report),
                *("-r", REQUIREMENTS / "gpu.txt", "-c", constraints),
            ],
            check=True,
        )
        found = json.loads(report.read_text())
    packages = [item["metadata"] for item in found["install"]]
    # An index may offer a build with a local version, such as torch's +cu130.
    versions = {canonicalize_name(package["name"]): package["version"].partition("+")[0] for package in packages}
    return found["environment"]["python_version"], versions


def lock_lines(resolved: Mapping[str, Versions]) -> Iterator[str]:
    """One line a package and version; with a marker where versions of Python need different ones.

    Args:
        resolved: version of Python -> version of each package.
    """
    for name in sorted({name for versions in resolved.values() for name in versions}):
        pythons: dict[str, list[str]] = {}
        for python, versions in resolved.items():
            if name in versions:
                pythons.setdefault(versions[name], []).append(python)
        for version, needed_by in pythons.items():
            marker = " or ".join(f'python_version == "{python}"' for python in needed_by)
            yield f"{name}=={version}" + (f" ; {marker}" if len(pythons) > 1 else "")


def main(argv: Sequence[str] | None = None) -> None:
    """Resolve with every interpreter, then print the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="such as python3.11")
    resolved = dict(map(resolve, parser.parse_args(argv).pythons))
    print(HEAD.format(pythons=", ".join(resolved)), *lock_lines(resolved), sep="\n")


if __name__ == "__main__":
    main()
