"""What a container of a daemon keeps from an agent, and the agent from others."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
from pathlib import Path

import pytest

from mgrpo.environments.boxes.box import MIB, Bounds, BoxError, BoxLost
from mgrpo.environments.boxes.containers.container_box import open_container
from mgrpo.environments.boxes.opening import open_box
from tests.unit.environments.boxes.boxed import PLENTY_S, python, running, served, sh, until
from tests.unit.environments.boxes.contained import BOUNDS, IMAGE, with_container
from tests.unit.environments.boxes.docker_daemon import docker


def test_values_are_seen_by_no_other_user_of_the_machine(real):
    """Keys are in nobody's list of processes, and not in what the daemon tells of a container."""
    key = "key-4711-of-the-agent"

    async def use(box):
        given = {"OPENAI_API_KEY": key, "HTTPS_PROXY": f"http://me:{key}@proxy", "DOCKER_HOST": f"tcp://{key}"}
        process = await box.start(["sleep", "3459"], env=given)
        await until(lambda: running("3459"))
        told = docker("inspect", box._name) + docker("top", box._name, "-eo", "pid,args") + docker("logs", box._name)
        lists = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lists.append(file.read_bytes())
        await process.kill()
        assert key not in told
        assert not any(key.encode() in words for words in lists)
        told = await python(
            box, f"import os; print({{name: os.environ[name] for name in {sorted(given)}}} == {given})", env=given
        )
        assert told == "True"

    with_container(use)


def test_memory_and_processes_have_limits_that_the_box_outlives(real):
    """An agent that takes too much is judged like any other: its check must still be able to start."""

    async def use(box):
        done = await box.exec(["python3", "-c", "print(len(b'x' * (800 << 20)))"], timeout_s=PLENTY_S)
        assert (done.status, done.stdout) == (-9, b"")
        bomb = await box.start(
            ["python3", "-c", "import os, time\nwhile True:\n try: os.fork()\n except OSError: pass"]
        )
        current = Path(_cgroup(box._name), "pids.current")
        await until(lambda: int(current.read_text()) >= 60)
        assert (await sh(box, "sleep 1 & sleep 1 & sleep 1 & sleep 1 & wait")).status != 0
        await box.end_processes()
        assert int(current.read_text()) < 8, "what has ended counts as well"
        assert (await bomb.wait(PLENTY_S)).status == -9
        orphans = "i=0; while [ $i -lt 40 ]; do (sleep 0 &); i=$((i+1)); done"
        for _ in range(4):
            assert (await sh(box, orphans)).status == 0
        assert await python(box, "print(2 + 2)") == "4"

    with_container(use)


def _cgroup(name: str) -> str:
    """Folder with the count of a container's processes, in either version of control groups."""
    container = docker("inspect", "--format", "{{.Id}}", name)
    roots = ("/sys/fs/cgroup/pids/docker", "/sys/fs/cgroup/docker")
    return next(folder for root in roots if os.path.exists(folder := f"{root}/{container}"))


def test_a_network_is_there_only_where_it_is_granted(real):
    """What an agent could reach of this machine and beyond is the run's decision."""
    probe = """if True:
        import os, socket, sys
        print(sorted(os.listdir("/sys/class/net")))
        with socket.socket() as s:
            s.settimeout(20)
            print(s.connect_ex((sys.argv[1], 8000)))
    """

    async def use():
        serving, granted, alone = [
            await open_container(Bounds(image=IMAGE, network=network)) for network in (True, True, False)
        ]
        try:
            server = await serving.start(["python3", "-u", "-m", "http.server", "8000"])
            await until(lambda: b"Serving" in server.said)
            place = docker("inspect", "--format", "{{.NetworkSettings.IPAddress}}", serving._name)
            return [
                (await box.exec(["python3", "-c", probe, place], timeout_s=PLENTY_S)).stdout for box in (granted, alone)
            ]
        finally:
            for box in (serving, granted, alone):
                await box.close()

    granted, alone = (text.decode().splitlines() for text in asyncio.run(use()))
    assert granted == ["['eth0', 'lo']", "0"]
    assert alone == ["['lo']", "101"], "ENETUNREACH"


def test_rights_cannot_be_gained_in_a_container(real):
    """What runs in it is root there, and has neither raw packets nor devices."""

    async def use(box):
        status = dict(
            line.split(":\t") for line in (await sh(box, "cat /proc/self/status")).stdout.decode().splitlines()
        )
        assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
        assert int(status["CapBnd"], 16) & (1 << 13 | 1 << 27 | 1 << 21 | 1 << 19) == 0, "raw, mknod, sys_admin, ptrace"
        assert (await sh(box, "mknod /tmp/disk b 254 0")).status != 0
        assert (await sh(box, "echo x > /run/mgrpo/x")).status != 0

    with_container(use)


@pytest.mark.parametrize("user", ["0", "1000"])
def test_an_agent_cannot_speak_for_the_first_process(real, monkeypatch, user):
    """Its word that all are dead must be its own: what lived on would see the check. Nor does it take modules from the agent's folder."""
    _built(monkeypatch, f"RUN chmod 755 /root; echo 'raise SystemExit(7)' | tee signal.py > socket.py\nUSER {user}\n")
    script = """if True:
        import ctypes
        through = []
        for name, mode in (("fd/1", "w"), ("fd/0", "r"), ("fd/2", "w"), ("mem", "rb"), ("environ", "rb")):
            try: open(f"/proc/1/{name}", mode)
            except PermissionError: continue
            through.append(name)
        if ctypes.CDLL(None).ptrace(0x4206, 1, None, None) == 0: through.append("ptrace")
        print(through)
    """

    async def use(box):
        assert (await sh(box, "id -u")).stdout == f"{user}\n".encode()
        assert await python(box, script, cwd="/") == "[]"
        assert "python3" in docker("top", box._name, "-o", "pid,comm")
        with served() as url:
            assert await box.url_for(url) == "http://127.0.0.1:47123"
        await box.start(["sleep", "3462"])
        await until(lambda: running("3462"))
        await box.end_processes()
        assert not running("3462")

    with_container(use, dataclasses.replace(BOUNDS, image="built:1"))


def test_an_image_whose_first_process_cannot_be_closed_is_refused(real, monkeypatch):
    """Some builds of Python leave ctypes out."""
    _built(monkeypatch, f"RUN rm -r {os.path.dirname(ctypes.__file__)}\n")
    with pytest.raises(BoxError, match="'built:1' did not start: its python3 has no ctypes"):
        asyncio.run(open_container(dataclasses.replace(BOUNDS, image="built:1")))


def _built(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """An image built:1 with more than the usual one."""
    monkeypatch.setenv("DOCKER_BUILDKIT", "0")
    docker("build", "--network", "none", "--tag", "built:1", "-", stdin=f"FROM {IMAGE}\n{lines}".encode())


def test_cores_are_held_back(real):
    """Agents share a machine with engines."""
    bounds = dataclasses.replace(BOUNDS, cpus=0.5)

    async def use(box):
        assert docker("inspect", "--format", "{{.HostConfig.NanoCpus}}", box._name) == "500000000"
        spent = "import time; s = time.monotonic()\nwhile time.monotonic() < s + 4: pass\nprint(time.process_time())"
        assert float(await python(box, spent)) < 3.0

    with_container(use, bounds)
    with pytest.raises(ValueError, match="agent_cpus holds back containers alone"):
        asyncio.run(open_box("local", bounds))


def test_a_container_that_writes_too_much_ends(real, monkeypatch):
    """Its daemon's disk is that of all others; what is written elsewhere than in the working folder counts as well."""
    monkeypatch.setattr("mgrpo.environments.boxes.containers.container_box._SIZE_EVERY_S", 0.2)
    bounds = dataclasses.replace(BOUNDS, disk_bytes=32 * MIB)

    async def use(box):
        assert (await sh(box, "head -c 20000000 /dev/zero > zeros; sleep 1")).status == 0
        with pytest.raises(BoxLost, match="has written more than 32 MiB"):
            await sh(box, "head -c 20000000 /dev/zero > /tmp/zeros; sleep 3461")
        with pytest.raises(BoxLost, match="has written more than 32 MiB"):
            await sh(box, "true")
        await until(lambda: not running("3461"))

    with_container(use, bounds)
