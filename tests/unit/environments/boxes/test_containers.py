"""Containers as boxes: by a daemon of docker, where one can be started, and by a stand-in for its command line."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgrpo.environments.boxes import harbor
from mgrpo.environments.boxes.box import MIB, Bounds, BoxError, BoxLost, Done
from mgrpo.environments.boxes.containers.container_box import open_container, remove_orphans
from mgrpo.environments.boxes.opening import open_box
from mgrpo.environments.launch.command import CommandAgent
from mgrpo.environments.offered.agent import Endpoint
from tests.namespaces import skip_without_namespaces
from tests.unit.environments.boxes import fake_docker
from tests.unit.environments.boxes.boxed import PLENTY_S, python, running, served, sh, until, wait_until
from tests.unit.environments.boxes.docker_daemon import daemon, docker, make_image
from tests.unit.environments.boxes.task_folders import COMPARE, task_folder

IMAGE = fake_docker.IMAGE
ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/s/0-1", api_key="the-api-key", reward_key=None)
BOUNDS = Bounds(image=IMAGE, memory_bytes=512 * MIB, max_processes=64, output_bytes=4096)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that has the image."""
    with daemon(tmp_path_factory.mktemp("docker")) as address:
        make_image(address, IMAGE, fake_docker.WORKDIR)
        yield address


@pytest.fixture
def real(address, monkeypatch, tmp_path) -> None:
    """The program `docker` asks the daemon."""
    monkeypatch.setenv("DOCKER_HOST", address)
    _own_temporary(monkeypatch, tmp_path)
    yield
    assert docker("ps", "--all", "--quiet") == "", "no container may stay"


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Path:
    """The stand-in is the program `docker`; its folder, in which it records its calls."""
    skip_without_namespaces()
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_docker.__file__} "$@"\n')
    program.chmod(0o755)
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(state))
    _own_temporary(monkeypatch, tmp_path)
    return state


@pytest.fixture(params=["real", "stand_in"])
def either(request: pytest.FixtureRequest) -> str:
    """Which of the two the program `docker` is."""
    request.getfixturevalue(request.param)
    return request.param


def _own_temporary(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "temporary"))


def _calls(state: Path) -> list[list[str]]:
    return [json.loads(line) for line in (state / "calls").read_text().splitlines()]


def _containers() -> list[str]:
    """Names of all that are there."""
    return sorted(docker("ps", "--all", "--format", "{{.Names}}").split())


def _with_box(use, bounds: Bounds = BOUNDS):
    async def run():
        box = await open_container(bounds)
        try:
            return await use(box)
        finally:
            await box.close()

    return asyncio.run(run())


def test_a_container_does_what_a_box_does(either, monkeypatch):
    """An agent's command is told where it is by variables alone; the protocol must hold for each kind of box."""
    monkeypatch.setenv("MGRPO_TEST_SECRET", "hidden")

    async def use(box):
        assert box.folder == fake_docker.WORKDIR and await box.alive()
        done = await sh(
            box, "pwd; cat; echo $A $HOME; env | grep -c SECRET; exit 3", env={"A": "ü b", "HOME": "/h"}, stdin=b"in\n"
        )
        assert done == Done(status=3, stdout=f"{box.folder}\nin\nü b /h\n0\n".encode())
        merged = await box.start(["sh", "-c", "echo out; echo err >&2; exit 7"])
        assert await merged.wait(PLENTY_S) == Done(status=7, stdout=b"out\nerr\n")
        await box.put("in/a b", b"\x00\xff" * 1000, mode=0o600)
        assert await box.get(f"{box.folder}/in/a b", max_bytes=2000) == b"\x00\xff" * 1000
        with pytest.raises(FileNotFoundError):
            await box.get("none", max_bytes=1)
        for path, text in (("in/a b", "longer than 1999"), ("in", "not a regular file")):
            with pytest.raises(OSError, match=text):
                await box.get(path, max_bytes=1999)
        with pytest.raises(OSError):
            await box.put("/proc/none", b"")
        hangs = await box.start(["sh", "-c", "echo began; sleep 3456"])
        await until(lambda: hangs.said)
        late = await hangs.wait(0.1)
        assert late.timed_out and late.stdout == b"began\n"
        await sh(box, "echo x > kept; (setsid sleep 3456 &) ; sleep 3456 & exit 0")
        await until(lambda: len(running("3456")) == 2)
        await box.end_processes()
        assert not running("3456") and await box.get("kept", max_bytes=10) == b"x\n"
        long = await sh(box, "head -c 100000 /dev/zero; echo the end")
        assert long.truncated and long.stdout.endswith(b"\0the end\n") and len(long.stdout) == BOUNDS.output_bytes

    _with_box(use)
    assert _containers() == []


def test_the_command_line_has_every_limit(stand_in, tmp_path):
    """A container without them would have the machine's network and memory."""

    async def nothing(box):
        pass

    _with_box(nothing)
    run = next(call for call in _calls(stand_in) if call[0] == "run")
    pairs = set(itertools.pairwise(run))
    for pair in (
        ("--network", "none"),
        ("--memory", f"{512 * MIB}b"),
        ("--memory-swap", f"{512 * MIB}b"),
        ("--pids-limit", "64"),
        ("--security-opt", "no-new-privileges"),
        ("--entrypoint", "sh"),
    ):
        assert pair in pairs
    assert "--rm" in run and not any(word in run for word in ("--privileged", "host"))
    assert list((tmp_path / "temporary").iterdir()) == []
    _with_box(nothing, Bounds(image=fake_docker.IMAGE, network=True))
    assert ("--network", "bridge") in [pair for call in _calls(stand_in) for pair in itertools.pairwise(call)]


def test_the_endpoint_is_reached_without_a_network(either):
    """By a socket that is mounted, and what listens for it inside; also after the agent's end has ended that."""
    script = """if True:
        import sys, urllib.request
        for size in (1, 3_000_000):
            request = urllib.request.Request(sys.argv[1], data=b"x" * size)
            with urllib.request.urlopen(request) as answer: print(len(answer.read()))
    """

    async def use(box):
        with served() as url:
            for _ in range(2):
                inner = await box.url_for(f"{url}/s/7/v1")
                assert inner == "http://127.0.0.1:47123/s/7/v1"
                done = await box.exec(["python3", "-c", script, inner], timeout_s=PLENTY_S)
                assert done.stdout.split() == [b"9", b"3000008"], done
                await box.end_processes()

    _with_box(use)


def test_a_container_that_is_gone_is_lost(either):
    """Removed by its daemon's owner, or for its memory: no score, not the score 0."""

    async def use(box):
        waiting = asyncio.create_task(sh(box, "sleep 3457"))
        await until(lambda: running("3457"))
        subprocess.run(["docker", "rm", "-f", box._name], check=True)
        with pytest.raises(BoxLost):
            await waiting
        assert not await box.alive()
        with pytest.raises(BoxLost):
            await sh(box, "true")
        await box.close()
        await box.close()

    _with_box(use)


def test_a_container_ends_with_a_killed_worker(either):
    """Its first process reads from its owner; the program that passes this on outlives the owner and sees the end."""
    script = f"""if True:
        import asyncio, tempfile
        tempfile.tempdir = {tempfile.tempdir!r}
        from mgrpo.environments.boxes.box import Bounds
        from mgrpo.environments.boxes.containers.container_box import open_container
        async def main():
            box = await open_container(Bounds(image={fake_docker.IMAGE!r}))
            await box.start(["sleep", "3458"])
            print("started", flush=True)
            await asyncio.sleep(1000)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout.readline() == b"started\n"
            wait_until(lambda: running("3458"))
        finally:
            worker.kill()
    wait_until(lambda: not running("3458") and not _containers())
    assert len(os.listdir(tempfile.tempdir)) == 1
    asyncio.run(remove_orphans("docker"))
    assert os.listdir(tempfile.tempdir) == []


def test_orphans_are_removed_at_a_start(either, request):
    """What outlives even the program `docker`; a living run's containers, another machine's and others' stay."""
    from mgrpo.environments.boxes.containers import container_box as containers

    own = f"{containers._machine()}/{containers._boot()}/{os.getpid()}/{containers._began(str(os.getpid()))}"
    for name, label in {
        "living": own,
        "elsewhere": own.replace(containers._machine(), "other"),
        "ended": own.rpartition("/")[0] + "/1",
        "of-a-boot-before": own.replace(containers._boot(), "0"),
    }.items():
        if either == "real":
            docker("create", "--name", name, "--label", f"{containers.LABEL}={label}", IMAGE, "true")
        else:
            state = request.getfixturevalue("stand_in")
            (state / f"{name}.container").write_text(json.dumps({"pid": 0, "label": label}))
    assert asyncio.run(remove_orphans("docker")) == 2
    assert _containers() == ["elsewhere", "living"]
    docker("rm", "-f", "elsewhere", "living")


def test_what_is_missing_is_named(stand_in, monkeypatch):
    """An image, the program, its daemon: each has another remedy."""
    with pytest.raises(ValueError, match="agent_box=docker needs agent_image"):
        asyncio.run(open_box("docker", Bounds()))
    with pytest.raises(ValueError, match="agent_image='none:1' cannot be had from docker: docker: pull: denied"):
        asyncio.run(open_box("docker", Bounds(image="none:1")))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="no program podman on the PATH"):
        asyncio.run(open_box("podman", BOUNDS))


def test_a_container_that_does_not_start_says_why(either, monkeypatch):
    """The daemon's own words are what its owner can search for."""
    monkeypatch.setattr("mgrpo.environments.boxes.containers.container_box._PYTHON", "echo no space left >&2; exit 1")
    with pytest.raises(BoxError, match="did not start: no space left"):
        asyncio.run(open_container(BOUNDS))


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

    _with_box(use)


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

    _with_box(use)


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

    _with_box(use)


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

    _with_box(use, dataclasses.replace(BOUNDS, image="built:1"))


def test_an_image_whose_first_process_cannot_be_closed_is_refused(real, monkeypatch):
    """Some builds of Python leave ctypes out."""
    _built(monkeypatch, f"RUN rm -r {os.path.dirname(ctypes.__file__)}\n")
    with pytest.raises(BoxError, match="'built:1' did not start: its python3 has no ctypes"):
        asyncio.run(open_container(dataclasses.replace(BOUNDS, image="built:1")))


def _built(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """An image built:1 with more than the usual one."""
    monkeypatch.setenv("DOCKER_BUILDKIT", "0")
    docker("build", "--network", "none", "--tag", "built:1", "-", stdin=f"FROM {IMAGE}\n{lines}".encode())


def test_a_number_that_an_agent_wrote_ends_nothing(either):
    """It is the number of what is to be killed, and may be any text."""

    async def use(box):
        await sh(box, "echo 99999999999999999999 > /tmp/own")
        await box.kill("/tmp/own")
        await box.end_processes()
        assert await box.alive()

    _with_box(use)


def test_a_container_outlives_neither_its_owner_nor_the_program(real):
    """A machine that runs out of memory kills both at once."""
    script = f"""if True:
        import asyncio, os, tempfile
        tempfile.tempdir = {tempfile.tempdir!r}
        from mgrpo.environments.boxes.box import Bounds
        from mgrpo.environments.boxes.containers.container_box import open_container
        async def main():
            box = await open_container(Bounds(image={IMAGE!r}))
            await box.start(["sleep", "3460"])
            print(box._first.process.pid, flush=True)
            await asyncio.sleep(1000)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as worker:
        try:
            program = int(worker.stdout.readline())
            wait_until(lambda: running("3460"))
        finally:
            os.kill(program, 9)
            worker.kill()
    wait_until(lambda: not running("3460") and not _containers())


@pytest.mark.parametrize(
    ("agent", "reward"),
    [
        ("cat seed.txt > hello.txt", 1.0),
        ("mkdir -p /tests /logs/verifier; echo 'echo 1 > /logs/verifier/reward.txt' | tee /tests/test.sh | sh", 0.0),
    ],
    ids=["solves", "judges itself"],
)
def test_a_task_folder_of_harbor_is_built_played_and_judged(real, tmp_path, monkeypatch, capsys, agent, reward):
    """By the command that the conversion prints, in the folder that the image names, by tests that the agent has not seen."""
    task = task_folder(tmp_path / "hello", f"{COMPARE}echo $reward > /logs/verifier/reward.txt")
    (task / "environment/Dockerfile").write_text(f"FROM {IMAGE}\nWORKDIR /app\nCOPY seed.txt .\n")
    (task / "environment/seed.txt").write_text("Hello\n")
    assert harbor.main([str(task), "--out", str(tmp_path / "out")]) == 0
    subprocess.run(shlex.split(capsys.readouterr().out), check=True, env={**os.environ, "DOCKER_BUILDKIT": "0"})
    row = json.loads((tmp_path / "out/rows.jsonl").read_text())
    truth = {"ground_truth": row.pop("ground_truth")}
    monkeypatch.chdir(tmp_path / "out")

    async def play():
        command = f"sh -c {shlex.quote(f'pwd; ls /tests; {agent}')}"
        player = CommandAgent(command=command, check="python3 check.py", box="docker", image=IMAGE, cpus=1)
        await player.setup()
        try:
            await player.reset(row, seed=0)
            return await player.run(ENDPOINT, truth=truth, limit_s=PLENTY_S)
        finally:
            await player.close()

    outcome = asyncio.run(play())
    assert outcome.reward == reward, outcome
    assert outcome.output.startswith("/app\n") and "test.sh" not in outcome.output


def test_cores_are_held_back(real):
    """Agents share a machine with engines."""
    bounds = dataclasses.replace(BOUNDS, cpus=0.5)

    async def use(box):
        assert docker("inspect", "--format", "{{.HostConfig.NanoCpus}}", box._name) == "500000000"
        spent = "import time; s = time.monotonic()\nwhile time.monotonic() < s + 4: pass\nprint(time.process_time())"
        assert float(await python(box, spent)) < 3.0

    _with_box(use, bounds)
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

    _with_box(use, bounds)
