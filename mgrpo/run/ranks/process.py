"""The environment of a run's processes: torchrun's variables, and those that must be set before torch is imported."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

from mgrpo.config.schema import Config
from mgrpo.processes.address import LOOPBACK, own_address, own_interfaces
from mgrpo.rollout.process_limits import raise_open_files
from mgrpo.rollout.start import engines_are_local

LAUNCHED = "MGRPO_LAUNCHED"
"""Variable set in the ranks that `mgrpo train --nproc-per-node` starts."""
STORE_SOCKET = "MGRPO_STORE_SOCKET"
"""Variable set in rank 0 of those: number of the inherited socket on which it serves the ranks' store."""
OPENMP = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""Defaults of OpenMP: spinning threads on a busy machine make a matmul 20 times slower."""

_OWN: set[str] = set()
"""Variables that `prepare_environment` has set."""


class Store(Protocol):
    """torch's key-value store, which all ranks can read and write before they have a process group."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


def rank() -> int:
    """This learner's number; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of learner ranks; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This learner's number on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def process_age_s() -> float:
    """Seconds since the start of this process."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def num_local_learners() -> int:
    """Number of learner ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def meeting_host(store: Store) -> str:
    """This machine's address for the run's other machines; the loopback address if there are none. Every rank must call.

    Also sets the interface of gloo and NCCL, unless the user has chosen one.

    Raises:
        OSError: there is no route from this machine to another one of the run.
    """
    if num_local_learners() == world_size():
        return LOOPBACK
    if rank() == int(os.environ.get("LOCAL_RANK", "0")):
        # On rank 0's machine MASTER_ADDR may be a loopback address: use the route to the next machine's first rank.
        address = own_address(store.get(f"address of rank {num_local_learners()}").decode())
    else:
        address = own_address(os.environ["MASTER_ADDR"])
        store.set(f"address of rank {rank()}", address)
    for name, value in own_interfaces(address).items():
        os.environ.setdefault(name, value)
    return address


def store_socket() -> int | None:
    """Number of the socket on which this rank serves the ranks' store; None: another process serves it."""
    number = os.environ.get(STORE_SOCKET)
    return None if number is None else int(number)


def has_launcher() -> bool:
    """True if torchrun or `mgrpo train --nproc-per-node` has started this rank, and is its parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ or LAUNCHED in os.environ


def users_environment() -> dict[str, str]:
    """The environment without the variables of `prepare_environment`, which for example disable the network."""
    return {name: value for name, value in os.environ.items() if name not in _OWN}


def prepare_environment(config: Config) -> None:
    """Set the variables that torch reads at its import, unless the user has set them, and raise the limit of open files."""
    raise_open_files()
    defaults = {
        **OPENMP,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # For each learner; the default is up to 32.
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
    if config.parallel.tensor_model_parallel_size > 1 and config.parallel.zero_stage < 2:
        # With one queue a message of tensor parallelism starts before the product that hides it. Megatron-FSDP gathers the
        # next layer during this one, for which it needs several.
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Packs differ in length, which fragments segments of a fixed size.
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in defaults.items():
        if name not in os.environ:
            os.environ[name] = value
            _OWN.add(name)
    if engines_are_local(config) and os.environ.get("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
