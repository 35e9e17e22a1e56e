"""Learners and engines that take turns on two nodes: two network namespaces, each with a learner, its Ray and its engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launching import ROOT, Run
from tests.e2e.test_nodes import metrics, weights

pytestmark = pytest.mark.slow

UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "--fork", "--kill-child")
NODES = """
set -e
hostname node0
ip link set lo up
unshare --net --uts sh -e -c '
    hostname node1
    ip link set lo up
    ip link add veth1 type veth peer name veth0 netns '$$'
    ip address add 10.78.0.2/24 dev veth1
    ip link set veth1 up
    export VLLM_HOST_IP=10.78.0.2
    exec "$@" --node-rank 1 -- $ARGUMENTS >"$FOLDER/node1.txt" 2>&1
' sh "$@" &
for _ in $(seq 200); do ip link show veth0 >/dev/null 2>&1 && break; sleep 0.05; done
ip address add 10.78.0.1/24 dev veth0
ip link set veth0 up
echo two machines
export VLLM_HOST_IP=10.78.0.1
"$@" --node-rank 0 -- $ARGUMENTS >"$FOLDER/node0.txt" 2>&1
wait $!
"""
FLAGS = (
    *("--config", "examples/configs/quickstart.yaml", "--tensor_model_parallel_size", "2", "--vllm_num_engines", "2"),
    *("--vllm_mode", "colocate", "--vllm_enable_sleep_mode", "true", "--vllm_kv_cache_mb", "64"),
    *("--total_episodes", str(256 * 10), "--warm_up_steps", "1", "--weight_sync_check_every", "1", "--resume", "never"),
    *("--checkpoint_state_freq", "4"),
)


def on_two_nodes(folder: Path) -> subprocess.CompletedProcess[str]:
    launch = [
        sys.executable, "-m", "mgrpo.cli", "launch", "--nodes", "2", "--head", "10.78.0.1", "--nproc-per-node", "1",
    ]  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_", "NCCL_"))}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    flags = [*FLAGS, "--output_dir", str(folder / "out")]
    with subprocess.Popen(
        [*UNSHARE, "sh", "-c", NODES, "sh", *launch],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**kept, "FOLDER": str(folder), "ARGUMENTS": " ".join(flags)},
    ) as process:
        try:
            said, _ = process.communicate(timeout=400)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(launch, process.returncode, said, "")


def test_a_colocated_run_on_two_nodes_learns_the_same_as_on_one(tmp_path):
    """Nothing but the network joins the nodes: what a learner there holds comes through the one here, or not at all."""
    done = on_two_nodes(tmp_path)
    if "two machines" not in done.stdout:
        pytest.skip(f"this user cannot make networks: {done.stdout.strip()}")
    said = "".join(path.read_text()[-3000:] for path in sorted(tmp_path.glob("node?.txt")))
    assert done.returncode == 0, said + done.stdout
    (tmp_path / "one").mkdir()
    one = Run(tmp_path / "one", [*FLAGS[2:]], program=None)
    try:
        assert one.wait(300) == 0, one.text()[-3000:]
    finally:
        one.end()
    ours, theirs = metrics(tmp_path / "out"), metrics(one.output_dir)
    assert sum("reward" in line for line in ours) == 10
    assert ours == theirs
    assert weights(tmp_path / "out") == weights(one.output_dir)
    assert "slower way over gloo" not in said
