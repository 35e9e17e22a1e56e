"""Two nodes on this machine, as `mgrpo launch` starts them, each with its learner, its Ray and its engine.

They are two loopback addresses, or two network namespaces that only a cable joins.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.e2e.launching import ROOT

FOREIGN = ("RANK", "WORLD_SIZE", "MASTER_", "RAY_", "GLOO_", "NCCL_")
"""The beginnings of variables that nodes do not inherit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What the two nodes run on."""

    addresses: tuple[str, str]
    enter: tuple[Sequence[str], Sequence[str]] = ((), ())
    """The beginning of a command that is to run on each."""
    variables: Mapping[str, str] = field(default_factory=dict)


LOOPBACK = Machines(
    # Not 127.0.0.1, which Ray replaces by the machine's public address.
    addresses=("127.0.0.2", "127.0.0.3"),
    variables={"GLOO_SOCKET_IFNAME": "lo", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"},
)
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--uts", "--fork", "--kill-child")
CABLE = """
set -e
hostname node0
ip link set lo up
unshare --net --uts sh -e -c '
    hostname node1
    ip link set lo up
    ip link add veth1 type veth peer name veth0 netns '$$'
    ip address add 10.78.0.2/24 dev veth1
    ip link set veth1 up
    echo $$
    exec sleep infinity
' &
for _ in $(seq 200); do ip link show veth0 >/dev/null 2>&1 && break; sleep 0.05; done
ip address add 10.78.0.1/24 dev veth0
ip link set veth0 up
wait
"""


@contextmanager
def cabled() -> Iterator[Machines]:
    """Two network namespaces; the test is skipped where this user cannot make them."""
    with subprocess.Popen(
        [*UNSHARE, "sh", "-c", CABLE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline().strip()
            if not said.isdecimal():
                pytest.skip(f"this user cannot make networks: {said}")
            (first,) = psutil.Process(process.pid).children()
            enter = [
                ("nsenter", "--target", str(pid), "--user", "--net", "--uts", "--preserve-credentials")
                for pid in (first.pid, int(said))
            ]
            yield Machines(addresses=("10.78.0.1", "10.78.0.2"), enter=(enter[0], enter[1]))
        finally:
            os.killpg(process.pid, signal.SIGKILL)


class Nodes:
    """Two launchers, each in a session of its own, output in a file of each."""

    def __init__(self, folder: Path, *flags: str, machines: Machines = LOOPBACK) -> None:
        self.folder, self.output_dir, self.machines = folder, folder / "out", machines
        # Not a port that the system gives away: Ray listens at the next one, seconds later.
        head = f"{machines.addresses[0]}:{21000 + 2 * (os.getpid() % 4000)}"
        self.processes = [self._start(rank, head, flags) for rank in (1, 0)][::-1]

    def _start(self, rank: int, head: str, flags: tuple[str, ...]) -> subprocess.Popen:
        command = [
            *self.machines.enter[rank],
            sys.executable, "-m", "mgrpo.cli", "launch", "--nodes", "2", "--node-rank", str(rank), "--head", head,
            "--nproc-per-node", "1", "--", "--config", "examples/configs/quickstart.yaml",
            "--tensor_model_parallel_size", "2", "--vllm_num_engines", "2", "--output_dir", str(self.output_dir), *flags,
        ]  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        with self.log(rank).open("w") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # With more cores Ray could place both engines on one node.
                preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]),
                env={**kept, **self.machines.variables, "VLLM_HOST_IP": self.machines.addresses[rank]},
            )

    def log(self, rank: int) -> Path:
        return self.folder / f"node{rank}.txt"

    def text(self, rank: int = 0) -> str:
        return self.log(rank).read_text(errors="replace")

    def ends(self) -> str:
        """What both have said last."""
        return self.text(0)[-3000:] + self.text(1)[-3000:]

    def wait_for(self, words: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while words not in self.text(0):
            assert all(process.poll() is None for process in self.processes), self.ends()
            assert time.monotonic() < deadline, self.ends()
            time.sleep(0.1)

    def wait(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]

    def family(self, rank: int) -> list[psutil.Process]:
        top = psutil.Process(self.processes[rank].pid)
        return [top, *top.children(recursive=True)]

    def engine(self, rank: int) -> psutil.Process:
        """The actor of a node's engine."""
        [actor] = [p for p in self.family(rank) if "ray::EngineActor" in " ".join(p.cmdline())]
        return actor

    def end(self) -> None:
        """Kill what is left of both."""
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                for member in self.family(rank):
                    member.send_signal(signal.SIGKILL)
