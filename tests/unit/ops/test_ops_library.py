"""The compiled library: its absence, its build description, and that its CUDA side compiles."""

from __future__ import annotations

import importlib.util
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
# As setup.py's 8.0;9.0+PTX, which the compiler then does in one pass over the source.
ARCHS = ("sm_80", "sm_90")
GENCODE = [f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}" for arch in ARCHS]
NVCC_COMMAND = [NVCC, "-O3", "-std=c++17", *GENCODE, "-Werror=all-warnings", "-Xptxas", "-v", f"-I{ROOT}/csrc"]
# Registers a thread may take. The logprob kernels are bound by memory: 40 keep three blocks of 512 threads on a
# multiprocessor. The loss and the kept sets are bound by their launch: 64 keep four blocks of 256.
MAX_REGISTERS = {"logprob_cuda.cu": 40, "kept_cuda.cu": 64, "policy_loss_cuda.cu": 64}


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
        from mgrpo.ops import LossSettings, build_info, policy_loss, segment_mean, token_logprobs
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
            x, cu_seqlens = torch.randn(5, 7), torch.tensor([0, 3, 7], dtype=torch.int32)
            results = []
            for operands in (x, x.double()):
                leaf = operands[0].clone().requires_grad_()
                ratio = segment_mean(leaf - operands[1], operands[2].abs(), cu_seqlens)
                settings = LossSettings(surrogate="ppo_clip", ratio_level="sequence", ratio_low=0.8, ratio_high=1.2,
                                        delta=0, dual_clip=0, beta=0.1, kl_estimator=2, kl_bias_correction=False,
                                        use_rho=False, rho_clamp_low=0, rho_clamp_high=0, rho_mask_low=0,
                                        rho_mask_high=0)
                loss, _ = policy_loss(leaf, *operands[1:3], operands[3].abs(), cu_seqlens, seq_log_ratio=ratio,
                                      ref_logprobs=operands[4], settings=settings)
                results.append((loss.detach().double(), torch.autograd.grad(loss, leaf)[0].double()))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
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


def test_a_library_from_other_sources_is_not_used(compiled: None) -> None:
    """Settings travel without names: an old build would take a clip bound for a weight, and train."""
    program = """
        import torch
        from mgrpo import _C
        _C.loss_settings = lambda: ["surrogate"]
        import mgrpo.ops
        info = mgrpo.ops.build_info()
        print(info["compiled"], info["error"])
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == "False it was built from other sources than this Python code\n", run.stderr


def test_every_source_file_is_listed() -> None:
    """setup.py and CMake read one list; a file missing there is a kernel that never gets built or tested."""
    listed = {path for part, paths in listed_sources().items() if part != "flag" for path in paths}
    present = {str(path.relative_to(ROOT)) for end in ("*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(end)}
    assert listed == present


@pytest.fixture(scope="module")
def cuda_objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """File name of each CUDA source -> its object with code for all ARCHS, and what the assembler said about it."""
    if NVCC is None:
        pytest.skip(NVCC_MISSING)
    objects = {}
    for source in listed_sources()["core_cuda"]:
        name = Path(source).name
        path = tmp_path_factory.mktemp("cuda") / f"{name}.o"
        compile_ = subprocess.run(
            [*NVCC_COMMAND, "-c", str(ROOT / source), "-o", str(path)], capture_output=True, text=True, timeout=240
        )
        assert compile_.returncode == 0, compile_.stderr
        objects[name] = path, compile_.stderr
    return objects


def test_cuda_kernels_compile_without_spills(cuda_objects: dict[str, tuple[Path, str]]) -> None:
    """A spilled register is traffic to memory in the inner loop of a kernel that is bound by memory."""
    assert cuda_objects.keys() == MAX_REGISTERS.keys()
    entry = re.compile(
        r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?(?P<stack>\d+) bytes stack frame, "
        r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    for source, (_, log) in cuda_objects.items():
        kernels = [match.groupdict() for match in entry.finditer(log)]
        assert len(kernels) == log.count("Compiling entry function")
        names = [{kernel["name"] for kernel in kernels if kernel["arch"] == arch} for arch in ARCHS]
        assert names[0] and names[0] == names[1]
        for kernel in kernels:
            assert (kernel["stack"], kernel["stores"], kernel["loads"]) == ("0", "0", "0"), kernel
            assert int(kernel["registers"]) <= MAX_REGISTERS[source], kernel


def test_logprob_kernels_load_16_bytes_at_a_time(cuda_objects: dict[str, tuple[Path, str]]) -> None:
    """Two bytes at a time the loads, not the memory, set the pace; the compiler narrows them without a word."""
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("no cuobjdump beside nvdisasm, on PATH, in nvcc's toolkit or in triton")
    folder = f"{Path(cuobjdump).parent}{os.pathsep}{os.environ['PATH']}"
    dump = subprocess.run(
        [cuobjdump, "-sass", str(cuda_objects["logprob_cuda.cu"][0])],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": folder},
    )
    assert dump.returncode == 0, dump.stderr
    _, *functions = re.split(r"^\s*Function : ", dump.stdout, flags=re.MULTILINE)
    streaming = [text for text in functions if re.match(r"\w*(stats|grad)_kernel", text)]
    assert len(streaming) == len(functions) - len(ARCHS)  # all but merge, which reads 16 bytes a token in all
    for text in streaming:
        name = text.split(maxsplit=1)[0]
        assert re.search(r"\bLDG\.\S*128\b", text), f"{name} has no load of 16 bytes"
        assert "grad_kernel" not in name or re.search(r"\bSTG\.\S*128\b", text), f"{name} has no store of 16 bytes"


def find_cuobjdump() -> str | None:
    """It calls nvdisasm, which lies beside it."""
    triton = importlib.util.find_spec("triton")
    folders = [] if triton is None else [Path(triton.origin).parent / "backends" / "nvidia" / "bin"]
    folders += [] if NVCC is None else [nvcc_toolkit() / "bin"]
    path = os.pathsep.join([os.environ["PATH"], *map(str, folders)])
    cuobjdump = shutil.which("cuobjdump", path=path)
    return cuobjdump if cuobjdump and (Path(cuobjdump).parent / "nvdisasm").exists() else None


def nvcc_toolkit() -> Path:
    """Folder of the toolkit, which a link or a script on PATH does not tell."""
    dryrun = subprocess.run([NVCC, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
    return Path(re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE).group(1))


@pytest.mark.skipif(NVCC is None, reason=NVCC_MISSING)
def test_cuda_bindings_compile_against_this_torch() -> None:
    """The glue needs no CUDA build of torch to compile, so it need not wait for a GPU machine to be found broken."""
    torch_include = Path(torch.__file__).parent / "include"
    includes = (ROOT / "csrc", torch_include, torch_include / "torch/csrc/api/include", nvcc_toolkit() / "include")
    for source in listed_sources()["bindings_cuda"]:
        compile_ = subprocess.run(
            ["g++", "-std=c++20", "-fsyntax-only", *(f"-I{path}" for path in includes), str(ROOT / source)],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert compile_.returncode == 0, compile_.stderr
