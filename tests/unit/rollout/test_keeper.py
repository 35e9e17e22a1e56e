"""The surroundings of a private Ray cluster, with a program of another kind in the place of Ray's daemons."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from mgrpo.rollout.vllm import printed
from mgrpo.rollout.vllm.ray_processes import cluster_keeper as module
from mgrpo.rollout.vllm.ray_processes.cluster_keeper import ClusterKeeper


@pytest.fixture
def keeper():
    own = ClusterKeeper()
    yield own
    own.close()
    own._reaper.wait(20)
    assert not Path(own.folder).exists()


@pytest.fixture(params=["raylet", "gcs_server", "ray::DashboardAgent", "ray::RuntimeEnvAgent"])
def daemon(request, keeper):
    """A process of the cluster that is called like a daemon of Ray's."""
    program = f"{keeper.scratch}/{request.param}"
    shutil.copy(shutil.which("sleep"), program)
    process = subprocess.Popen([program, "60"], env=os.environ | keeper.mark)
    until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == f"{request.param[:15]}\n")
    yield process
    process.kill()


def until(claim, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_nobody_else_can_enter_the_folder(keeper):
    """Ray gives its own folder, with logs and sockets, to every user of the machine."""
    os.mkdir(keeper.ray_folder)
    os.chmod(keeper.ray_folder, 0o777)
    assert stat.S_IMODE(os.stat(keeper.folder).st_mode) == 0o700


def test_a_reaper_that_dies_is_replaced(keeper):
    """Otherwise the next kill -9 of rank 0 would leave Ray's agents behind, and the folder."""
    keeper.watch(lambda reason: None)
    first = keeper._reaper
    first.kill()
    until(lambda: keeper._reaper is not first)
    assert keeper._reaper.poll() is None


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "died of SIGKILL"), (signal.SIGSTOP, "has been stopped for 0 s; continue it with kill -CONT")],
)
def test_a_daemon_of_ray_that_fails_is_named(keeper, daemon, monkeypatch, number, words):
    """Ray takes minutes for it, and then it is the engine that does not answer; without its agents Ray starts no engine again."""
    monkeypatch.setattr(module, "STOPPED_S", 0.0)
    reasons = []
    keeper.watch(reasons.append)
    assert keeper.failure() is None
    daemon.send_signal(number)
    until(lambda: reasons)
    name = Path(daemon.args[0]).name.removeprefix("ray::")
    assert reasons == [f"Ray's {name} (process {daemon.pid}) {words}"]


def test_what_ray_has_of_an_engine_is_kept_without_following_links(keeper, tmp_path, monkeypatch):
    """An engine that cannot be imported prints before it has a file of its own; a link could lead to a file without end."""
    logs = Path(keeper.ray_folder) / "session_latest/logs"
    logs.mkdir(parents=True)
    monkeypatch.setattr(printed, "MOST_BYTES", 200)
    (logs / "worker-1.err").write_text("x" * 1000 + "\nIndexError: index 7 is out of range\n")
    (logs / "worker-2.out").symlink_to("/dev/zero")
    (logs / "worker-3.out").write_text(":job_id:01000000\n:actor_name:EngineActor\n")
    kept = tmp_path / "kept"
    assert keeper.keep_logs(kept) == (
        "; the last error of the engines' logs: IndexError: index 7 is out of range; "
        f"what the engines printed is in {kept}"
    )
    assert [(file.name, file.stat().st_size) for file in kept.iterdir()] == [("worker-1.err", 200)]
