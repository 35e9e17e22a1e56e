"""Ray on rank 0: a private cluster on loopback, or an existing one, for the engines.

Call from the main thread and before the import of Megatron: Ray's children are tied to the thread that forked them, and the engines
take longest to start.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mgrpo.config import Config, ConfigError
from mgrpo.processes.address import INTERFACES
from mgrpo.processes.visible import is_key
from mgrpo.rollout.vllm.engine_arguments import serving_gpus
from mgrpo.rollout.vllm.engine_set import EngineKind, EngineSet, RayPlace
from mgrpo.rollout.vllm.printed import FOLDER, last_error
from mgrpo.rollout.vllm.ray_engine import RayEngine
from mgrpo.rollout.vllm.ray_processes.cluster_keeper import ClusterKeeper
from mgrpo.rollout.vllm.ray_processes.node import OBJECT_STORE_BYTES, RAY_ENVIRONMENT

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

CLOSED_AT_ONCE = 32
"""Engines that are closed at the same time."""
UNUSED_SERVICES = ("start_api_server", "start_monitor", "start_log_monitor")
"""Methods of Ray's `Node` that start a dashboard, an autoscaler and a log monitor."""


class Cluster:
    """The Ray cluster of the engines. Create it on rank 0 only; always `close` it."""

    def __init__(self, config: Config, *, num_local_learners: int) -> None:
        self.settings = config.engine
        self.num_engines = self.settings.vllm_num_engines + config.distillation.num_engines
        self.owned = self.settings.ray_address is None
        self.keeper = ClusterKeeper() if self.owned else None
        self.sets: list[EngineSet] = []
        self.is_closing = False
        self.address: str | None = None
        """This machine's address in a cluster that was joined."""
        self.failure: Future[str] = Future()
        """Done, with the reason, when Ray itself has failed and no engine will answer."""
        self.logs = Path(config.experiment.output_dir).absolute() / FOLDER
        """The folder of the engines' output, which outlives the run."""
        self.logs.mkdir(parents=True, exist_ok=True)
        interfaces = {name: os.environ[name] for name in INTERFACES if name in os.environ}
        """Network interfaces that the user has chosen; later rank 0 adds those of its own machine."""
        gpus = serving_gpus()
        self.on_gpu = bool(gpus)
        free = gpus[num_local_learners:]
        try:
            with _without_own_variables(), _sigterm_blocked():
                ray = self._start_ray(self.keeper, free) if self.keeper else self._join_ray()
            self.ray = ray
            self.place = RayPlace(ray, self.on_gpu, self.keeper, interfaces, self.logs, lambda: self.is_closing)
            if not self.owned:
                self.address = self._own_address(num_free_gpus=len(free))
            if self.keeper:
                self.keeper.watch(self._fail)
        except BaseException:
            self.close()
            raise

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in the whole cluster, without the learners'."""
        return int(self.ray.cluster_resources().get("GPU", 0)) if self.on_gpu else 0

    def start_engines(self, kind: EngineKind) -> EngineSet:
        """Begin to start the engines of a model, in addition to existing ones."""
        with _without_own_variables(), _sigterm_blocked():
            self.sets.append(EngineSet(self.place, kind))
        return self.sets[-1]

    def _join_ray(self) -> Any:
        # Number of tries, of a second each; Ray reads it at its import.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")
        import ray
        from ray.exceptions import AuthenticationError

        address = self.settings.ray_address
        with tempfile.TemporaryFile() as printed:
            try:
                with _printing_to(printed):
                    ray.init(address=address, namespace="mgrpo", log_to_driver=False, logging_level="ERROR")
            except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as err:
                printed.seek(0)
                reason = str(err.__cause__ or err).strip().splitlines()[0]
                remedy = "the versions of Ray and Python must be the same on all machines"
                if "No node info found" in reason:
                    reason = "rank 0's machine is not one of its nodes, and Ray starts nothing from elsewhere"
                    remedy = f"let it join first: {self._joining()}"
                elif isinstance(err, AuthenticationError) or b"AuthToken" in printed.read():
                    reason = "its token is missing here, or is a different one"
                    remedy = (
                        "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN=TOKEN (or RAY_AUTH_TOKEN_PATH=FILE) here as there"
                    )
                raise ConfigError([f"ray_address={address}: the cluster cannot be joined: {reason}; {remedy}"]) from err
        return ray

    def _joining(self) -> str:
        return f"`ray start --address {self.settings.ray_address} --num-gpus 0`, as its GPUs belong to learners"

    def _own_address(self, *, num_free_gpus: int) -> str:
        """This machine's address in the cluster; ConfigError if Ray counts the learners' GPUs there as free."""
        own = next(node for node in self.ray.nodes() if node["NodeID"] == self.ray.get_runtime_context().get_node_id())
        num_gpus = int(own["Resources"].get("GPU", 0))
        if num_gpus > num_free_gpus and self.on_gpu:
            raise ConfigError(
                [
                    f"ray_address={self.settings.ray_address}: the cluster counts {num_gpus} GPUs on rank 0's machine, where "
                    f"learners leave {num_free_gpus}, and would start engines on theirs; end Ray on this machine (`ray stop`) and "
                    f"join again: {self._joining()}"
                ]
            )
        return str(own["NodeManagerAddress"])

    def _start_ray(self, keeper: ClusterKeeper, gpus: list[str]) -> Any:
        # Ray reads these at its import.
        os.environ.update(
            RAY_ENVIRONMENT,
            # A call after the shutdown must fail instead of starting a second cluster.
            RAY_ENABLE_AUTO_CONNECT="0",
            # One per process: Ray keeps the first.
            RAY_AUTH_TOKEN=os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
            # Otherwise Ray replaces a loopback address by the public one.
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            # Without its control store Ray cannot continue: report that after seconds, not after a minute.
            RAY_gcs_rpc_server_reconnect_timeout_s="10",
        )
        import ray

        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        with _environment({**keeper.mark, **visible}), _without_services():
            ray.init(
                address="local",
                namespace="mgrpo",
                num_cpus=max(os.cpu_count() or 1, self.num_engines),
                num_gpus=len(gpus),
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level="ERROR",
                _node_ip_address="127.0.0.1",
                _temp_dir=keeper.ray_folder,
            )
        return ray

    def keep_logs(self) -> str:
        """Copy output that is only in Ray's temporary folder to the run's; returns a clause for messages about all output."""
        return self.keeper.keep_logs(self.logs) if self.keeper else last_error(self.logs)

    def _engines(self) -> list[RayEngine]:
        return [engine for started in self.sets for engine in started.engines]

    def _fail(self, reason: str) -> None:
        if self.is_closing:
            return  # the daemons end on request
        for engine in self._engines():
            engine.fail(reason)
        self.failure.set_result(reason)

    def close(self) -> None:
        """End engines and Ray. The reaper ends surviving processes: those that hang, or all of them if rank 0 is killed."""
        self.is_closing = True
        ray = getattr(self, "ray", None)
        if ray is not None:
            with ThreadPoolExecutor(CLOSED_AT_ONCE, thread_name_prefix="engine-end") as pool:
                list(pool.map(RayEngine.close, self._engines()))
            ray.shutdown()
            # Ray has reset SIGTERM to its default, which would interrupt the rest of the clean-up.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            self.ray = None
        if self.keeper is not None:
            self.keeper.close()


@contextmanager
def _printing_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect standard error, including that of Ray's C++ part, to `file` within the block."""
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that are started within the block; this process gets its own back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _without_services() -> Iterator[None]:
    """Keep Ray from starting its dashboard, autoscaler and log monitor, which a private cluster does not use.

    With `include_dashboard=False` it would start the dashboard without its pages, and wait for it: a second, and two of CPU time.
    """
    from ray._private.node import Node

    services = {name: getattr(Node, name) for name in UNUSED_SERVICES}
    for name in services:
        setattr(Node, name, lambda node, **settings: None)
    try:
        yield
    finally:
        for name, start in services.items():
            setattr(Node, name, start)


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM, which launchers send to whole process groups, for processes and threads that are started within the block.

    Only rank 0's main thread handles it: it first ends the step and saves the state, for which it needs Ray, the engines and its
    other threads. Ray would end rank 0 ten seconds after losing its control store.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_own_variables() -> Iterator[None]:
    """Hide torchrun's variables and the keys of trackers and judges (not the Hub's) from Ray's processes, which do not need them."""
    names = [n for n in os.environ if n in _LAUNCHER_VARIABLES or n.startswith("TORCHELASTIC_") or is_key(n)]
    saved = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(saved)
