"""Containers as boxes: by a daemon of docker, where one can be started, and by a stand-in for its command line."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mgrpo.environments.boxes import harbor
from mgrpo.environments.boxes.box import MIB, Bounds, BoxError, BoxLost, Done
from mgrpo.environments.boxes.containers import container_box
from mgrpo.environments.boxes.containers.container_box import _IMAGE, open_container, remove_orphans
from mgrpo.environments.boxes.opening import check_box, open_box
from mgrpo.environments.launch.command import CommandAgent
from mgrpo.environments.offered.agent import Endpoint
from tests.unit.environments.boxes import fake_docker
from tests.unit.environments.boxes.boxed import PLENTY_S, running, served, sh, until, wait_until
from tests.unit.environments.boxes.contained import BOUNDS, IMAGE, containers, with_container
from tests.unit.environments.boxes.docker_daemon import docker
from tests.unit.environments.boxes.task_folders import COMPARE, task_folder

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/s/0-1", api_key="the-api-key", reward_key=None)


def _calls(state: Path) -> list[list[str]]:
    return [json.loads(line) for line in (state / "calls").read_text().splitlines()]


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

    with_container(use)
    assert containers() == []


def test_the_command_line_has_every_limit(stand_in, tmp_path):
    """A container without them would have the machine's network and memory."""

    async def nothing(box):
        pass

    with_container(nothing)
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
    with_container(nothing, Bounds(image=fake_docker.IMAGE, network=True))
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

    with_container(use)


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

    with_container(use)


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
    wait_until(lambda: not running("3458") and not containers())
    assert len(os.listdir(tempfile.tempdir)) == 1
    asyncio.run(remove_orphans("docker"))
    assert os.listdir(tempfile.tempdir) == []


def test_orphans_are_removed_at_a_start(either, request):
    """What outlives even the program `docker`; a living run's containers, another machine's and others' stay."""
    own = f"{container_box._machine()}/{container_box._boot()}/{os.getpid()}/{container_box._began(str(os.getpid()))}"
    for name, label in {
        "living": own,
        "elsewhere": own.replace(container_box._machine(), "other"),
        "ended": own.rpartition("/")[0] + "/1",
        "of-a-boot-before": own.replace(container_box._boot(), "0"),
    }.items():
        if either == "real":
            docker("create", "--name", name, "--label", f"{container_box.LABEL}={label}", IMAGE, "true")
        else:
            state = request.getfixturevalue("stand_in")
            (state / f"{name}.container").write_text(json.dumps({"pid": 0, "label": label}))
    assert asyncio.run(remove_orphans("docker")) == 2
    assert containers() == ["elsewhere", "living"]
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


def test_a_number_that_an_agent_wrote_ends_nothing(either):
    """It is the number of what is to be killed, and may be any text."""

    async def use(box):
        await sh(box, "echo 99999999999999999999 > /tmp/own")
        await box.kill("/tmp/own")
        await box.end_processes()
        assert await box.alive()

    with_container(use)


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
    wait_until(lambda: not running("3460") and not containers())


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


@pytest.mark.parametrize(
    "image",
    [
        *(
            "--help",
            "-v/:/host",
            "",
            " --privileged",
            "a b",
            "a\nb",
            "a:1\n",
            "a\0b",
            "a\ud800b",
            "x" * 600,
            "$(id)",
            "\u202ea:1",
        ),
        *("/etc", "../x", "dir:/etc", "docker-archive:/x.tar", "docker://a/b", "http://a/b", "a/", "a:1@sha256:z"),
    ],
)
def test_what_is_no_name_of_an_image_reaches_no_program(stand_in, image):
    """A row's image stands among the words of a command line, and podman reads some words as files of this machine."""
    with pytest.raises(ValueError, match="is no name of an image; expected") as caught:
        with_container(None, Bounds(image=image))
    assert len(str(caught.value)) < 600 and not (stand_in / "calls").exists()


@pytest.mark.parametrize(
    "image",
    [
        *(
            "agents:1",
            "python",
            "a/b_c/d-e.f:3.11-slim",
            "localhost:5000/a",
            "HOST.example:443/a/b:1",
            "[::1]:5000/a:1",
        ),
        *("a@sha256:" + "0f" * 32, "ghcr.io/a/b:v1@sha256:" + "0f" * 32, "sha256:" + "0f" * 32, "0f" * 6),
    ],
)
def test_names_of_images_are_taken_in_every_form(image):
    assert _IMAGE.fullmatch(image)


@pytest.mark.parametrize(
    ("status", "said"), [(1, "Error response from daemon: no"), (125, "Error: no"), (0, ""), (44, "")]
)
def test_a_failure_of_the_daemon_is_no_verdict_of_a_check(stand_in, monkeypatch, status, said):
    """The program `docker` ends with status 1 where its daemon is at fault, which of a check would be the reward 0."""

    async def use(box):
        _answer_instead(stand_in, "exec", f"echo '{said}' >&2; exit {status}")
        for asked in (
            box.exec(["sh", "-c", "exit 0"], timeout_s=PLENTY_S),
            box.get("none", max_bytes=1),
            (await box.start(["true"])).wait(PLENTY_S),
        ):
            with pytest.raises(BoxLost, match=f"has not begun: {said}"):
                await asked

    with_container(use)


@pytest.mark.parametrize("words", ["State.Running", "image inspect", "ps -a"])
def test_a_daemon_that_does_not_answer_is_named(stand_in, monkeypatch, words):
    """A timeout without words leaves nobody anything to look at."""
    monkeypatch.setattr("mgrpo.environments.boxes.containers.container_box._ASK_S", 0.5)
    _answer_instead(stand_in, words, "exec sleep 3461")
    bounds = dataclasses.replace(BOUNDS, start_timeout_s=0.5 if words == "image inspect" else PLENTY_S)

    async def use(box):
        # Its own `_ask` has the default of before.
        monkeypatch.setattr(box, "_ask", functools.partial(box._ask, limit_s=0.5))
        await box.exec(["sh", "-c", "exit 3"], timeout_s=PLENTY_S)

    async def run():
        await check_box("docker", bounds)
        box = await open_container(bounds)
        try:
            await use(box)
        finally:
            await box.close()

    with pytest.raises(
        BoxError, match=r"did not end within 0\.5 s; see whether the daemon answers|was not ready|has ended"
    ):
        asyncio.run(run())
    assert not running("3461")


@pytest.mark.parametrize(
    "label", ["", "\xff", "{machine}", "{machine}/{boot}//1", "{machine}/{boot}/self/x", "{machine}/{boot}/1/2/3"]
)
def test_a_label_that_no_run_has_written_removes_nothing(stand_in, label):
    """Whoever uses the daemon may label containers, and so may images."""
    label = label.format(machine=container_box._machine(), boot=container_box._boot())
    (stand_in / "other.container").write_text(json.dumps({"pid": 0, "label": label}))
    assert asyncio.run(remove_orphans("docker")) == 0
    assert containers() == ["other"]


def test_volumes_of_an_image_go_with_its_container(stand_in):
    async def nothing(box):
        pass

    with_container(nothing)
    assert [call[:-1] for call in _calls(stand_in) if call[0] == "rm"] == [["rm", "--force", "--volumes"]]


@pytest.mark.parametrize("number", ["0", "-1", "1", "none", None])
def test_a_late_agent_ends_whatever_it_has_made_of_its_number(stand_in, monkeypatch, number):
    """By the file with its number it is killed."""
    text = container_box._text
    monkeypatch.setattr(container_box, "_text", lambda name: text(name).replace("NUMBER_S = 25.0", "NUMBER_S = 0.2"))
    change = "rm -f $f" if number is None else f"echo {number} > $f"

    async def use(box):
        agent = await box.start(["sh", "-c", f"for f in /tmp/.mgrpo-*; do {change}; done; echo done; sleep 3462"])
        await until(lambda: b"done" in agent.said)
        done = await agent.wait(0.1)
        assert done.timed_out and done.stdout == b"done\n" and not running("3462")
        assert (await sh(box, "exit 5")).status == 5

    with_container(use)


def test_a_check_is_not_held_up_by_pipes_that_an_agent_left(stand_in):
    """A shell that opens a pipe to which nobody listens waits for ever, and a check that did so would judge nothing."""

    async def use(box):
        await sh(box, "for i in $(seq 40); do mkfifo /tmp/.mgrpo-$i; done")
        await box.put("a", b"x")
        assert (await sh(box, "cat a")).stdout == b"x"

    with_container(use)


def test_an_agent_that_removes_its_folder_is_judged_all_the_same(stand_in):
    async def use(box):
        await sh(box, "rm -rf $PWD/*; touch a")
        await box.exec(["sh", "-c", "umount /srv/work 2>/dev/null; rm -rf /srv/work"], cwd="/", timeout_s=PLENTY_S)
        await box.put("/tmp/check/a", b"x")
        assert await box.get("/tmp/check/a", max_bytes=1) == b"x"
        with pytest.raises(FileNotFoundError):
            await box.get("result", max_bytes=1)

    with_container(use)


def test_what_an_image_says_gives_a_terminal_no_orders(stand_in):
    _answer_instead(stand_in, "run --rm", r"printf '\033]0;x\007bad' >&2; exit 1")
    with pytest.raises(BoxError, match=r"did not start: \?\]0;x\?bad$"):
        with_container(None)


def _answer_instead(stand_in: Path, words: str, script: str) -> None:
    """Have the program `docker` do this for calls with these words."""
    program = stand_in.parent / "bin" / "docker"
    text = program.read_text()
    program.write_text(text.replace("exec ", f'case "$*" in *"{words}"*) {script};; esac\nexec ', 1))


def test_links_of_other_users_are_no_folders_that_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file").write_text("kept")
    link = tmp_path / "tmp" / "mgrpo-container-1-0-x"
    link.symlink_to(tmp_path / "own")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert asyncio.run(remove_orphans("docker")) == 0
    assert (tmp_path / "own" / "file").read_text() == "kept" and link.is_symlink()
