"""vLLM's GPU build on a machine without a GPU, which it takes for one with H100s.

It needs requirements/gpu.txt and gcc. Nothing can be computed: what is asked is how vLLM would be configured.
"""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parents[2]
DRIVER = "libcuda.so.1"
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""
CAPABILITY = (9, 0)
NAME = "NVIDIA H100 80GB HBM3"
MEMORY_BYTES = 80 << 30
UNITS = 132
GPUS = 8


def environment(folder: Path) -> dict[str, str]:
    """For a process that is to `believe`: in `folder` are made a driver's library and what tells vLLM of mgrpo's plugin."""
    _make_driver(folder)
    _make_metadata(folder)
    paths = [str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(GPUS))),
        "XDG_CACHE_HOME": str(folder),
    }


def _make_driver(folder: Path) -> None:
    """A library with the driver's functions that vLLM's extensions want, each of which fails."""
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None, "requirements/gpu.txt"
    extensions = sorted(Path(vllm.origin).parent.rglob("*.so"))
    wanted = subprocess.run(
        ["nm", "-D", "--undefined-only", *extensions], capture_output=True, text=True, check=True
    ).stdout
    functions = sorted(set(re.findall(r" U (cu[A-Z]\w+)$", wanted, re.MULTILINE)))
    assert functions, "vLLM's extensions want nothing of the driver: this is not its GPU build"
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in functions))
    subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", folder / DRIVER, source], check=True)


def _make_metadata(folder: Path) -> None:
    """What an installed mgrpo says of itself; installing it here would compile its extension anew, for another torch."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in own.items()) for group, own in points.items()
    ]
    own = folder / "mgrpo-0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: mgrpo\nVersion: 0\n")
    (own / "entry_points.txt").write_text("".join(lines))


def believe() -> None:
    """Let vLLM and torch say in this process that there are H100s."""
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*CAPABILITY))
        get_device_name = classmethod(lambda cls, device_id=0: NAME)
        get_device_uuid = classmethod(lambda cls, device_id=0: f"GPU-{device_id}")
        get_device_total_memory = classmethod(lambda cls, device_id=0: MEMORY_BYTES)
        is_fully_connected = classmethod(lambda cls, device_ids: True)
        device_count = classmethod(lambda cls: GPUS)
        num_compute_units = classmethod(lambda cls, device_id=0: UNITS)
        log_warnings = classmethod(lambda cls: None)

    vllm.platforms._current_platform = H100()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: GPUS
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_name = lambda device=None: NAME
