"""The command lines for containers, by a stand-in for docker: no daemon has run them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mgrpo.environments.boxes.box import MIB, Bounds, BoxError, BoxLost, Done
from mgrpo.environments.boxes.containers import open_container, remove_orphans
from mgrpo.environments.boxes.opening import open_box
from tests.namespaces import skip_without_namespaces
from tests.unit.environments.boxes import fake_docker
from tests.unit.environments.boxes.boxed import PLENTY_S, running, served, sh, until, wait_until

BOUNDS = Bounds(image=fake_docker.IMAGE, memory_bytes=512 * MIB, max_processes=64, output_bytes=4096)


@pytest.fixture
def docker(tmp_path, monkeypatch) -> Path:
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
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return state


def _calls(state: Path) -> list[list[str]]:
    return [json.loads(line) for line in (state / "calls").read_text().splitlines()]


def _with_box(use, bounds: Bounds = BOUNDS):
    async def run():
        box = await open_container(bounds)
        try:
            return await use(box)
        finally:
            await box.close()

    return asyncio.run(run())


def test_a_container_does_what_a_box_does(docker, monkeypatch):
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
        late = await sh(box, "echo began; sleep 3456", timeout_s=1.5)
        assert late.timed_out and late.stdout == b"began\n"
        await sh(box, "echo x > kept; (setsid sleep 3456 &) ; sleep 3456 & exit 0")
        assert len(running("3456")) >= 2
        await box.end_processes()
        assert not running("3456") and await box.get("kept", max_bytes=10) == b"x\n"
        long = await sh(box, "head -c 100000 /dev/zero; echo the end")
        assert long.truncated and long.stdout.endswith(b"\0the end\n") and len(long.stdout) == BOUNDS.output_bytes

    _with_box(use)
    assert list(docker.glob("*.container")) == []
    assert not any("ü b" in word for call in _calls(docker) for word in call), "values are seen in lists of processes"


def test_the_command_line_has_every_limit(docker, tmp_path):
    """A container without them would have the machine's network and memory."""

    async def nothing(box):
        pass

    _with_box(nothing)
    run = next(call for call in _calls(docker) if call[0] == "run")
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
    assert ("--network", "bridge") in [pair for call in _calls(docker) for pair in itertools.pairwise(call)]


def test_the_endpoint_is_reached_without_a_network(docker):
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


def test_a_container_that_is_gone_is_lost(docker):
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


def test_a_container_ends_with_a_killed_worker(docker):
    """Its first process reads from its owner; the program that passes this on outlives the owner and sees the end."""
    script = f"""if True:
        import asyncio, tempfile
        tempfile.tempdir = {tempfile.tempdir!r}
        from mgrpo.environments.boxes.box import Bounds
        from mgrpo.environments.boxes.containers import open_container
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
    wait_until(lambda: not running("3458") and not list(docker.glob("*.container")))
    assert len(os.listdir(tempfile.tempdir)) == 1
    asyncio.run(remove_orphans("docker"))
    assert os.listdir(tempfile.tempdir) == []


def test_orphans_are_removed_at_a_start(docker):
    """What outlives even the program `docker`; a living run's containers, another machine's and others' stay."""
    from mgrpo.environments.boxes import containers

    own = f"{containers._machine()}/{containers._boot()}/{os.getpid()}/{containers._began(str(os.getpid()))}"
    for name, label in {
        "living": own,
        "elsewhere": own.replace(containers._machine(), "other"),
        "ended": own.rpartition("/")[0] + "/1",
        "of-a-boot-before": own.replace(containers._boot(), "0"),
    }.items():
        (docker / f"{name}.container").write_text(json.dumps({"pid": 0, "label": label}))
    assert asyncio.run(remove_orphans("docker")) == 2
    assert sorted(file.stem for file in docker.glob("*.container")) == ["elsewhere", "living"]


def test_what_is_missing_is_named(docker, monkeypatch):
    """An image, the program, its daemon: each has another remedy."""
    with pytest.raises(ValueError, match="agent_box=docker needs agent_image"):
        asyncio.run(open_box("docker", Bounds()))
    with pytest.raises(ValueError, match="agent_image='none:1' cannot be had from docker: docker: pull: denied"):
        asyncio.run(open_box("docker", Bounds(image="none:1")))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="no program podman on the PATH"):
        asyncio.run(open_box("podman", BOUNDS))


def test_a_container_that_does_not_start_says_why(docker, monkeypatch):
    """The daemon's own words are what its owner can search for."""
    monkeypatch.setattr("mgrpo.environments.boxes.containers._FIRST", "echo no space left >&2; exit 1")
    with pytest.raises(BoxError, match="did not start: no space left"):
        asyncio.run(open_container(BOUNDS))
