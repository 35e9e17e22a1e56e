"""Ranks of two machines, as the kernel's namespaces make them: each has a network, a name and a hosts file of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mgrpo.processes.address import INTERFACES

UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child")
MACHINES = """
set -e
hostname node0
printf '127.0.0.1 localhost\\n127.0.1.1 node0\\n10.77.0.2 node1\\n' > "$1/hosts0"
printf '127.0.0.1 localhost\\n127.0.1.1 node1\\n10.77.0.1 node0\\n' > "$1/hosts1"
mount --bind "$1/hosts0" /etc/hosts
ip link set lo up
unshare --net --uts --mount sh -e -c '
    hostname node1
    mount --bind "$1/hosts1" /etc/hosts
    ip link set lo up
    ip link add veth1 type veth peer name veth0 netns 1
    ip address add 10.77.0.2/24 dev veth1
    ip link set veth1 up
    RANK=1 exec "$2" -c "$3"
' sh "$@" &
for _ in $(seq 200); do ip link show veth0 >/dev/null 2>&1 && break; sleep 0.05; done
ip address add 10.77.0.1/24 dev veth0
ip link set veth0 up
echo two machines
RANK=0 "$2" -c "$3"
wait $!
"""
RANK = """
import os, torch, torch.distributed as dist
from mgrpo.moving import from_values
from mgrpo.models.placement.boxes import Box
from mgrpo.run.ranks.process import rank
from mgrpo.run.start.launch import _meet
from mgrpo.run.ranks.liveness import Liveness
from mgrpo.sync.group import connect_store, open_store
from mgrpo.sync.live import LiveBoxes, WeightMessage
from mgrpo.sync.joining import SyncMembers, meet

watch = Liveness(rank=rank(), world_size=2, timeout_s=30, on_failure=print, on_goodbye=lambda: None)
host = _meet(from_values({"learner_timeout": 30, "backend_timeout": 1}), watch)
total = torch.tensor([1.0 + rank()])
dist.all_reduce(total)

place = [None]
if rank() == 0:
    store, port = open_store(host, 30)
    place = [(host, port)]
dist.broadcast_object_list(place)
if rank() == 1:
    store = connect_store(*place[0], 30)
own, other = rank(), 1 - rank()
members = SyncMembers(names=["a learner", "an engine"], rank=own, peers={other: 64}, is_worker=own == 1)
transport = meet(store, members, dtype=torch.float32, device=torch.device("cpu"), host=place[0][0], timeout_s=30)
box, value = Box("weight", (0,), (1,)), torch.tensor([42.0 * (1 - own)])
message = WeightMessage(LiveBoxes([(box, value)], value.dtype), [box])
(transport.send if own == 0 else transport.recv)({other: message}, lost=lambda peers, err: err).settle()
over = os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]
print(f"rank {rank()} at {host} over {over}: {total.item():g}, {value.item():g}\\n", end="", flush=True)
watch.leave(is_failing=False)
"""


def on_two_machines(folder, program: str) -> subprocess.CompletedProcess[str]:
    """`program` on node0 as rank 0 and on node1 as rank 1; each knows itself as 127.0.1.1."""
    environment = {
        # Ray in this process, which another test has started, is not theirs.
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name not in INTERFACES},
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [*UNSHARE, "sh", "-c", MACHINES, "sh", str(folder), sys.executable, program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_ranks_of_machines_that_know_themselves_by_loopback_meet(tmp_path):
    """So it is on Debian and in most images of clouds, where a machine's own name is not what others call by it."""
    done = on_two_machines(tmp_path, RANK)
    if "two machines" not in done.stdout:
        pytest.skip(f"this user cannot make networks: {done.stderr.strip()}")
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == [
        "rank 0 at 10.77.0.1 over ('veth0', '=veth0'): 3, 42",
        "rank 1 at 10.77.0.2 over ('veth1', '=veth1'): 3, 42",
    ], done.stdout + done.stderr
