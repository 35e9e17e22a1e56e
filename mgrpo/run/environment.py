"""The environment of a run's processes: what torchrun says in it, and what must be set before torch is imported."""

from __future__ import annotations

import os


def rank() -> int:
    """This learner's number; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Learner ranks; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_local_learners() -> int:
    """Learner ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def prepare_environment() -> None:
    """Set what must be set before torch is imported; what the user has set stays."""
    defaults = {
        # Spinning OpenMP threads on a busy machine make a matmul 20 times slower.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if os.environ.get("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
