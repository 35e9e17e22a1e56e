"""Builds mgrpo._C: CPU kernels always, CUDA kernels when torch was built with CUDA and nvcc is found.

    MGRPO_CUDA=auto|1|0         auto: CUDA if possible, otherwise one line says why not; 1: CUDA or an error; 0: CPU only
    CUDA_HOME                   a toolkit of torch's CUDA version; otherwise that of nvcc on PATH, pip's or /usr/local/cuda
    TORCH_CUDA_ARCH_LIST        default "8.0;9.0+PTX"
    MAX_JOBS                    number of compilers that run at once

Everything else about the package is in pyproject.toml. torch is deliberately not a build requirement there: a torch that
pip fetched only for the build could differ from the torch that the library then runs under. So torch is imported only
when something is compiled, from the environment that pip was called from.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
DEFAULT_CUDA_ARCHS = "8.0;9.0+PTX"


def sources(*parts: str) -> list[str]:
    """Values of the named parts of csrc/sources.txt, in its order."""
    lines = (ROOT / "csrc" / "sources.txt").read_text(encoding="utf-8").splitlines()
    entries = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return [value for part, value in entries if part in parts]


def import_torch() -> ModuleType:
    """torch of the calling environment, also inside pip's build isolation, which hides that environment's packages."""
    with contextlib.suppress(ImportError):
        import torch

        return torch
    # Isolation works through PYTHONPATH: an interpreter started without it sees what is really installed.
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import json, sys; print(json.dumps(sys.path[1:]))"
    real_path = json.loads(subprocess.run([sys.executable, "-c", program], env=bare, capture_output=True).stdout)
    sys.path.extend(path for path in real_path if path not in sys.path)
    try:
        import torch
    except ImportError as error:
        sys.exit(
            f"mgrpo: the extension is compiled against the torch that will run it, but torch cannot be imported here "
            f"({error}; python {sys.executable}).\n"
            f"  1. install torch 2.13 or newer into this environment: pip install torch\n"
            f"  2. run this command again; if the installer builds in an environment of its own (uv), add --no-build-isolation,\n"
            f"     which needs: pip install 'setuptools>=77' ninja"
        )
    return torch


def toolkit_of(nvcc: str) -> Path:
    """The toolkit's folder as nvcc reports it: the nvcc on PATH may be a link or a script."""
    dryrun = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull], capture_output=True, text=True
    )
    top = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
    return Path(top.group(1)).resolve() if top else Path(nvcc).resolve().parent.parent


def toolkits(torch: ModuleType) -> dict[Path, str]:
    """Folder -> version of each CUDA toolkit here: CUDA_HOME's, that of the nvcc on PATH, pip's, the usual one."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    homes += [toolkit_of(nvcc)] if nvcc else []
    homes += [*sorted(Path(torch.__file__).parent.parent.glob("nvidia/cu[0-9]*")), Path("/usr/local/cuda")]
    found = {}
    for home in homes:
        if (home / "bin" / "nvcc").exists():
            about = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True).stdout
            release = re.search(r"release ([\d.]+)", about)
            found[home] = release.group(1) if release else "of unknown version"
    return found


def cuda_home(torch: ModuleType) -> Path | None:
    """The toolkit to compile the CUDA kernels with; None: without them. That needs no GPU, so none is looked for."""
    mode = os.environ.get("MGRPO_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        sys.exit(f"mgrpo: MGRPO_CUDA={mode!r}, expected auto, 0 or 1")
    if mode == "0":
        return None
    wanted = torch.version.cuda
    if wanted is None:
        obstacle = f"this torch ({torch.__version__}) was built without CUDA; install a CUDA build of torch"
    else:
        present, major = toolkits(torch), wanted.split(".")[0]
        matching = [home for home, version in present.items() if version.split(".")[0] == major]
        if matching:
            print(f"mgrpo: CUDA kernels are built with CUDA {present[matching[0]]} in {matching[0]}", file=sys.stderr)
            return matching[0]
        others = ", ".join(f"CUDA {version} in {home}" for home, version in present.items())
        obstacle = (
            f"torch {torch.__version__} was built for CUDA {wanted} and no nvcc of CUDA {major} was found "
            f"({f'only {others}' if others else 'none at all'}); install one with pip install -r requirements/gpu.txt, or set "
            f"CUDA_HOME to its folder"
        )
    if mode == "1":
        sys.exit(f"mgrpo: MGRPO_CUDA=1, but {obstacle}; MGRPO_CUDA=0 builds without CUDA kernels")
    print(f"mgrpo: building without CUDA kernels: {obstacle}", file=sys.stderr)
    return None


def runtime_library(home: Path) -> str:
    """What the linker calls the CUDA runtime; pip's toolkit has it only under the name that programs load."""
    libraries = [path.name for folder in ("lib64", "lib") for path in (home / folder).glob("libcudart.so*")]
    return "cudart" if "libcudart.so" in libraries or not libraries else f":{min(libraries, key=len)}"


class BuildOps(build_ext):
    """build_ext that imports torch only when it runs, so that metadata and sdists need no torch."""

    def run(self) -> None:
        torch = import_torch()
        home = cuda_home(torch)
        with_cuda = home is not None
        if home is not None:
            # cpp_extension reads this once, when it is imported, and would guess wrong if nvcc is a link.
            os.environ["CUDA_HOME"] = str(home)
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHS)
        from torch.utils import cpp_extension

        make_extension = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
        parts = ["core", "bindings"] + (["core_cuda", "bindings_cuda"] if with_cuda else [])
        # -g0: Python's own flags ask for debug information, which makes a small library megabytes large.
        cxx = [*sources("flag"), "-g0", "-std=c++20"]
        if with_cuda:
            cxx.append(f'-DMGRPO_CUDA_ARCHS="{os.environ["TORCH_CUDA_ARCH_LIST"]}"')
        made = make_extension(
            "mgrpo._C",
            sources(*parts),
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args={"cxx": cxx, "nvcc": ["-O3", "-std=c++17"]} if with_cuda else {"cxx": cxx},
        )
        if home is not None:
            made.libraries = [runtime_library(home) if name == "cudart" else name for name in made.libraries]
        [extension] = self.extensions
        # The private fields are setuptools' own bookkeeping for the extension.
        vars(extension).update({name: value for name, value in vars(made).items() if not name.startswith("_")})

        builder = cpp_extension.BuildExtension(self.distribution, use_ninja=shutil.which("ninja") is not None)
        vars(builder).update(vars(self))
        builder.force = builder.force or builder.use_ninja  # ninja itself decides what is stale
        builder.run()


setup(
    ext_modules=[Extension("mgrpo._C", sources("core", "bindings"))],
    cmdclass={"build_ext": BuildOps},
)
