"""One machine's part of a Ray cluster of several: `mgrpo launch` starts it on every node that serves engines, and on node 0.

Ray's processes are found and ended by the node's folder, never by Ray's name, and do not outlive the process that makes the node.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mgrpo.processes.address import own_interfaces
from mgrpo.processes.visible import is_key
from mgrpo.rollout.vllm.ray_processes.cluster_keeper import ClusterKeeper

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",
}
"""Environment of Ray's processes. Ray reads some of these variables at its import."""
CONNECT_S = 5.0
"""Seconds for another machine to answer."""
OBJECT_STORE_BYTES = 256 << 20
NODE_SHARE = 0.01
"""Amount of the resource `learners_node` for an engine: a node has room for a hundred."""
START_S = 120.0


def address_problems(address: str | None) -> list[str]:
    """Problem if no Ray cluster answers at `HOST:PORT`; Ray itself would try for minutes. Other forms are not checked."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        return []
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as err:
        return [
            f"ray_address={address}: no Ray cluster answers there ({err}); start one on that machine with `ray start --head "
            f"--port {port}`, correct the address, or leave ray_address out to start one on this machine"
        ]
    return []


def learners_node(number: int) -> str:
    """Ray's resource that only the learners' node with this number has."""
    return f"mgrpo_learners_{number}"


class RayNode:
    """Ray on this machine. Always `close` it."""

    def __init__(
        self,
        *,
        address: str,
        head: str,
        is_head: bool,
        gpus: Sequence[str],
        num_cpus: int,
        token: str,
        learners: int | None = None,
    ) -> None:
        """Start Ray, and return when it runs.

        Args:
            address: address of this machine.
            head: `HOST:PORT` of the cluster.
            gpus: ids of the GPUs that engines may use.
            num_cpus: CPUs for Ray to count.
            learners: the number of the node among those whose learners share their devices with engines.
        Raises:
            RuntimeError: with Ray's last output.
        """
        self.keeper = ClusterKeeper()
        try:
            own = {} if learners is None else {learners_node(learners): 1}
            _ray_start(self.keeper, address, head, is_head, gpus, num_cpus, token, own)
        except BaseException:
            self.close()
            raise

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Monitor Ray in a thread, which calls `on_failure`, at most once, with the reason why Ray cannot continue."""
        self.keeper.watch(on_failure)

    def keep_logs(self, folder: Path) -> str:
        """See `ClusterKeeper.keep_logs`."""
        return self.keeper.keep_logs(folder)

    @property
    def processes(self) -> set[int]:
        """Children of this process that other code must not reap."""
        return self.keeper.processes

    def close(self) -> None:
        """End all of Ray's processes on this node."""
        for pid in self.keeper.daemons:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self.keeper.close()
        self.keeper.wait()


def _ray_start(
    keeper: ClusterKeeper,
    address: str,
    head: str,
    is_head: bool,
    gpus: Sequence[str],
    num_cpus: int,
    token: str,
    resources: Mapping[str, float],
) -> None:
    place = ["--head", "--port", head.rpartition(":")[2], "--include-dashboard", "false"]
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", *(place if is_head else ["--address", head]),
        "--node-ip-address", address, "--num-cpus", str(num_cpus), "--num-gpus", str(len(gpus)),
        "--resources", json.dumps(resources),
        "--object-store-memory", str(OBJECT_STORE_BYTES), "--temp-dir", keeper.ray_folder, "--disable-usage-stats",
    ]  # fmt: skip
    environment = {
        # The engines' interfaces: rank 0 cannot name them, as they may have other names on this node.
        **own_interfaces(address),
        **{name: value for name, value in os.environ.items() if not is_key(name)},
        **RAY_ENVIRONMENT,
        **keeper.mark,
        "RAY_AUTH_TOKEN": token,
        "TMPDIR": keeper.scratch,
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
        # The address where an engine's workers meet; vLLM would guess it.
        "VLLM_HOST_IP": address,
    }
    try:
        # Its output goes into a file: Ray's daemons inherit it, and a pipe would not end with the command.
        with open(f"{keeper.folder}/ray_start.txt", "w+b") as printed:
            code = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                timeout=START_S,
                check=False,
                # Ctrl-C reaches only the launcher, which ends Ray last.
                start_new_session=True,
            ).returncode
            printed.seek(0)
            lines = [line.strip() for line in printed.read().decode(errors="replace").splitlines() if line.strip()]
    except subprocess.TimeoutExpired as err:
        raise RuntimeError(f"`ray start` has not ended within {START_S:g} s") from err
    if code:
        raise RuntimeError(f"`ray start` ended with exit code {code}: {' / '.join(lines[-3:])}")
