"""Ray on rank 0: a private cluster on loopback (or an existing one), and one actor for each engine.

Call from the main thread and before Megatron is imported: Ray's children are tied to the thread that forked them, and the
engines take longest to start.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mgrpo.config.schema import Config
from mgrpo.rollout.vllm.arguments import engine_args, engine_environment, serving_gpus
from mgrpo.rollout.vllm.ray_engine import RayEngine

_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class Cluster:
    """The engines' actors and the Ray cluster they live in. Make it on rank 0 only; always `close` it."""

    def __init__(self, config: Config, *, num_local_learners: int) -> None:
        self.settings = config.engine
        self.owned = self.settings.ray_address is None
        self.folder: str | None = None
        self.engines: list[RayEngine] = []
        self.output_dir = Path(config.experiment.output_dir)
        gpus = serving_gpus()
        self.on_gpu = bool(gpus)
        free = gpus[num_local_learners:] if self.owned else gpus
        self._reaper: subprocess.Popen | None = None
        try:
            with _without_launcher_variables(), _sigterm_blocked():
                self.ray = self._start_ray(free)
                self.start_engines(config)
        except BaseException:
            self.close()
            raise

    def _start_ray(self, gpus: list[str]) -> Any:
        if not self.owned:
            import ray

            ray.init(address=self.settings.ray_address, namespace="mgrpo", log_to_driver=False)
            return ray
        # Unix socket paths are short, so the folder's path must also be short.
        folder = self.folder = tempfile.mkdtemp(prefix="mgrpo-", dir="/tmp")
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "mgrpo.rollout.vllm.reaper", folder], stdin=subprocess.PIPE, start_new_session=True
        )
        # Ray reads these when it is imported.
        os.environ.update(
            RAY_USAGE_STATS_ENABLED="0",
            # A call after the shutdown must fail instead of starting a second cluster.
            RAY_ENABLE_AUTO_CONNECT="0",
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
            RAY_AUTH_MODE="token",
            # One per process: Ray keeps the first.
            RAY_AUTH_TOKEN=os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
            RAY_prestart_worker_first_driver="0",
            RAY_enable_worker_prestart="0",
            RAY_worker_niceness="0",
            # Otherwise Ray replaces a loopback address by the public one.
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            # Without its control store Ray cannot go on: report it after seconds, not after a minute.
            RAY_gcs_rpc_server_reconnect_timeout_s="10",
        )
        import ray

        with _visible_gpus(gpus):
            ray.init(
                address="local",
                namespace="mgrpo",
                num_cpus=max(os.cpu_count() or 1, self.settings.vllm_num_engines),
                num_gpus=len(gpus),
                include_dashboard=False,
                object_store_memory=256 << 20,
                log_to_driver=False,
                logging_level="ERROR",
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
        return ray

    def start_engines(self, config: Config) -> None:
        """Begin to start the config's engines, in addition to those that are there; each has a `ready` to wait for."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from mgrpo.rollout.vllm.actor import EngineActor

        count, workers = self.settings.vllm_num_engines, self.settings.vllm_tensor_parallel_size
        bundle = {"GPU": workers, "CPU": 1} if self.on_gpu else {"CPU": 1}
        group = placement_group([bundle] * count, strategy="PACK")
        if not group.wait(60):
            raise RuntimeError(
                f"{count} engines need a placement group of {count} x {bundle}, and Ray has only "
                f"{self.ray.available_resources()}; lower vllm_num_engines or vllm_tensor_parallel_size"
            )
        remote = self.ray.remote(EngineActor)
        environment = engine_environment(config, on_gpu=self.on_gpu, is_local=self.owned)
        args = engine_args(config, on_gpu=self.on_gpu)
        for number in range(count):
            actor = remote.options(
                num_cpus=1,
                num_gpus=workers if self.on_gpu else 0,
                max_concurrency=1000,
                runtime_env={"env_vars": environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            ).remote()
            self.engines.append(RayEngine(actor, actor.start.remote(args)))

    def keep_logs(self) -> str:
        """Copy what the engines' processes printed into the run's folder, which outlives Ray's; a clause that says where."""
        logs = sorted(Path(self.folder).glob("session_latest/logs/worker-*.*")) if self.folder else []
        if not logs:
            return ""
        kept = self.output_dir / "engine_logs"
        kept.mkdir(parents=True, exist_ok=True)
        for log in logs:
            shutil.copy(log, kept)
        return f"; what the engines printed is in {kept}"

    def close(self) -> None:
        """End engines and Ray. The reaper ends what survives, such as a hung process or all of it when rank 0 is killed."""
        ray = getattr(self, "ray", None)
        if ray is not None:
            for engine in self.engines:
                engine.close()
            ray.shutdown()
            # Ray has set SIGTERM to its default, which would cut the rest of the clean-up short.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            self.ray = None
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper = None


@contextmanager
def _visible_gpus(gpus: list[str]) -> Iterator[None]:
    """Processes that are started within see these GPUs only; without any, what is visible stays as it is."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield
    finally:
        if gpus:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Processes and threads that are started within ignore SIGTERM, which launchers send to whole process groups.

    Only rank 0's main thread handles it: it ends the step and saves the state first, and needs Ray, the engines and its
    other threads for that. Ray would end rank 0 ten seconds after losing its control store.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_launcher_variables() -> Iterator[None]:
    """Ray's processes are not torchrun ranks, and must not inherit these variables."""
    names = [n for n in os.environ if n in _LAUNCHER_VARIABLES or n.startswith("TORCHELASTIC_")]
    saved = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(saved)
