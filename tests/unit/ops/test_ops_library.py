"""The compiled library: its absence, its build description, and that its CUDA side compiles."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import mgrpo.ops

ROOT = Path(__file__).resolve().parents[3]
NVCC = shutil.which("nvcc")
NVCC_MISSING = "nvcc is not on PATH"
# One architecture keeps the test short; the 8.0 code differs in nothing that these kernels use.
NVCC_COMMAND = [NVCC, "-O3", "-std=c++17", "-gencode=arch=compute_90,code=sm_90", "-Xptxas", "-v", f"-I{ROOT}/csrc"]


def listed_sources() -> dict[str, list[str]]:
    """csrc/sources.txt by part."""
    parts: dict[str, list[str]] = {}
    for line in (ROOT / "csrc" / "sources.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            part, value = line.split()
            parts.setdefault(part, []).append(value)
    return parts


def test_without_the_library_the_reference_runs_and_says_so_once() -> None:
    """A machine without a compiler trains correctly, and its user learns why it is slow."""
    program = """
        import sys, warnings
        sys.modules["mgrpo._C"] = None  # importing it now raises ImportError
        import torch
        from mgrpo.ops import build_info, token_logprobs
        assert not build_info()["compiled"] and "_C" in build_info()["error"]
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for inplace in (False, True):
                leaf = torch.randn(6, 50, requires_grad=True)
                logprobs, entropy = token_logprobs(leaf * 1, torch.arange(6), with_entropy=True, inplace=inplace)
                (grad,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), leaf)
                logp = torch.log_softmax(leaf, 1)
                expected = logp[torch.arange(6), torch.arange(6)], -(logp.exp() * logp).sum(1)
                torch.testing.assert_close((logprobs, entropy), expected)
                torch.testing.assert_close(grad, torch.autograd.grad(sum(e.sum() for e in expected), leaf)[0])
        [warning] = [str(w.message) for w in seen if "mgrpo" in str(w.message)]
        print(warning)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "the PyTorch reference runs instead" in run.stdout and "build_ext --inplace" in run.stdout


def test_build_info_describes_the_library(compiled: None) -> None:
    """A bug report starts with it."""
    info = mgrpo.ops.build_info()
    assert info["error"] is None
    assert re.match(r"\d+\.\d+", info["built_with_torch"])
    assert (info["cuda_archs"] != "") == ("CUDA" in torch._C._dispatch_dump("mgrpo::logprob_stats"))


def test_every_source_file_is_listed() -> None:
    """setup.py and CMake read one list; a file missing there is a kernel that never gets built or tested."""
    listed = {path for part, paths in listed_sources().items() if part != "flag" for path in paths}
    present = {str(path.relative_to(ROOT)) for end in ("*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(end)}
    assert listed == present


@pytest.mark.skipif(NVCC is None, reason=NVCC_MISSING)
def test_cuda_kernels_compile_without_spills(tmp_path: Path) -> None:
    """A spilled register is traffic to memory in the inner loop of a kernel that is bound by memory."""
    for source in listed_sources()["core_cuda"]:
        compile_ = subprocess.run(
            [*NVCC_COMMAND, "-c", str(ROOT / source), "-o", str(tmp_path / "kernels.o")],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert compile_.returncode == 0, compile_.stderr
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", compile_.stderr)
        assert spills and set(spills) == {("0", "0")}, compile_.stderr
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", compile_.stderr)]
        # Bound by memory: 40 keep three blocks of 512 threads on a multiprocessor. The loss is bound by its launch.
        limit = 40 if "logprob" in source else 64
        assert max(registers) <= limit, f"{source}: {registers}"


@pytest.mark.skipif(NVCC is None, reason=NVCC_MISSING)
def test_cuda_bindings_compile_against_this_torch() -> None:
    """The glue needs no CUDA build of torch to compile, so it need not wait for a GPU machine to be found broken."""
    dryrun = subprocess.run([NVCC, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
    toolkit = Path(re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE).group(1))
    torch_include = Path(torch.__file__).parent / "include"
    includes = (ROOT / "csrc", torch_include, torch_include / "torch/csrc/api/include", toolkit / "include")
    for source in listed_sources()["bindings_cuda"]:
        compile_ = subprocess.run(
            ["g++", "-std=c++20", "-fsyntax-only", *(f"-I{path}" for path in includes), str(ROOT / source)],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert compile_.returncode == 0, compile_.stderr
