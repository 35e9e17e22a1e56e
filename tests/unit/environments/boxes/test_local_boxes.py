"""What an agent's command finds in a box of this machine, and what is left of it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mgrpo.environments.boxes.box import MIB, Bounds, BoxLost, Done
from mgrpo.environments.boxes.local import leftover, sight
from mgrpo.environments.boxes.local.local_box import open_local
from mgrpo.environments.boxes.opening import check_box, open_box
from tests.namespaces import run_as_somebody, skip_without_namespaces
from tests.unit.environments.boxes.boxed import (
    PLENTY_S,
    SMALL,
    opened,
    python,
    running,
    served,
    sh,
    until,
    wait_until,
    with_box,
)

WALLS = ["user", "none"] if os.geteuid() else ["user", "root", "none"]


@pytest.fixture(params=WALLS)
def walls(request) -> str:
    if request.param != "none":
        skip_without_namespaces()
    return request.param


def test_commands_run_with_their_input_and_files(walls):
    """An agent works on files that others put there, and a check reads what it left."""

    async def use(box):
        assert (await sh(box, "pwd; ls -A")).stdout.decode() == f"{box.folder}\n"
        await box.put("in/row.json", b"\x00\xff" * 1000, mode=0o600)
        await box.put(f"{box.folder}/tool", b"#!/bin/sh\necho made; cat; exit 3", mode=0o755)
        done = await sh(box, "./tool >&2; echo $?; stat -c %a in/row.json", stdin=b"given")
        assert done == Done(status=0, stdout=b"3\n600\n", stderr=b"made\ngiven")
        assert await box.get("in/row.json", max_bytes=2000) == b"\x00\xff" * 1000
        merged = await box.start(["sh", "-c", "echo out; echo err >&2; exit 7"])
        assert await merged.wait(PLENTY_S) == await merged.wait() == Done(status=7, stdout=b"out\nerr\n")
        assert (await sh(box, "echo $A; pwd", env={"A": "ü b"}, cwd="/")).stdout.decode() == "ü b\n/\n"
        not_found = await box.exec(["no-such-program"], timeout_s=PLENTY_S)
        assert not_found.status == 127 and b"cannot start 'no-such-program'" in not_found.stderr

    with_box(walls, use)


def test_errors_of_files_are_those_of_the_system(walls):
    """The caller tells a result that was not written from one that is too long."""

    async def use(box):
        await box.put("f", b"12345")
        await sh(box, "mkfifo pipe")
        found = {}
        for path in ("none", "f", ".", "pipe"):
            with pytest.raises(OSError) as refusal:
                await box.get(path, max_bytes=4)
            found[path] = refusal.value.errno
        assert found == {"none": errno.ENOENT, "f": errno.EFBIG, ".": errno.EINVAL, "pipe": errno.EINVAL}
        with pytest.raises(OSError):
            await box.put("f/below", b"")

    with_box(walls, use)


def test_a_late_command_is_killed_and_its_last_words_kept(walls):
    """A trajectory's limit holds, and the log shows where the agent was."""

    async def use(box):
        done = await sh(box, "echo began; sleep 1000", timeout_s=1.0)
        assert done == Done(status=-9, stdout=b"began\n", timed_out=True)
        process = await box.start(["sleep", "1000"])
        waiting = asyncio.create_task(process.wait(PLENTY_S))
        await asyncio.sleep(0)
        await process.kill()
        assert await waiting == Done(status=-9)
        cancelled = asyncio.create_task(sh(box, "exec sleep 4321"))
        await asyncio.sleep(0.3)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await until(lambda: not running("4321"))

    with_box(walls, use)


def test_only_the_end_of_a_long_output_is_kept(walls):
    """The end has the error; the rest would fill this process's memory."""

    async def use(box):
        done = await sh(box, "head -c 3000000 /dev/full; echo the end; head -c 100000 /dev/full >&2")
        assert done.status == 0 and done.truncated and len(done.stdout) == len(done.stderr) == SMALL.output_bytes
        assert done.stdout.endswith(b"\0the end\n")
        endless = await sh(box, "yes", timeout_s=1.0)
        assert endless.timed_out and len(endless.stdout) == SMALL.output_bytes

    with_box(walls, use)


def test_what_an_agent_leaves_running_ends_before_the_check(walls):
    """A daemon of the agent could otherwise change what the check reads. Files stay."""

    async def use(box):
        await sh(box, "echo x > kept; setsid sleep 7654 >/dev/null 2>&1 & (setsid sleep 7654 &) ; sleep 7654 &")
        await until(lambda: len(running("7654")) >= 3)
        await box.end_processes()
        assert not running("7654")
        assert await box.get("kept", max_bytes=10) == b"x\n"
        assert (await sh(box, "echo on")).stdout == b"on\n"

    with_box(walls, use)


def test_the_endpoint_is_reached_by_ordinary_clients(walls):
    """An unchanged program knows a base_url and nothing of the walls."""
    script = """if True:
        import json, sys, urllib.request
        for size in (1, 3_000_000):
            request = urllib.request.Request(sys.argv[1], data=b"x" * size)
            with urllib.request.urlopen(request) as answer: print(len(answer.read()))
    """

    async def use(box):
        with served() as url:
            inner = await box.url_for(f"{url}/s/7/v1")
            assert inner.startswith("http://127.0.0.1:") and inner.endswith("/s/7/v1")
            assert (inner == f"{url}/s/7/v1") == (walls == "none")
            done = await asyncio.to_thread(lambda: None) or await box.exec(
                ["python", "-c", script, inner], timeout_s=PLENTY_S
            )
            assert done.stdout.split() == [b"9", b"3000008"], done
            many = f"for i in $(seq 8); do python -c '{script}' {inner} & done; wait"
            assert len((await sh(box, many, timeout_s=PLENTY_S)).stdout.split()) == 16

    with_box(walls, use)


def test_the_variables_of_the_run_are_not_given(walls, monkeypatch):
    """They hold the run's keys; a command has what it is given."""
    monkeypatch.setenv("MGRPO_TEST_SECRET", "hidden")

    async def use(box):
        names = json.loads(await python(box, "import json, os; print(json.dumps(dict(os.environ)))", env={"OWN": "1"}))
        assert set(names) - {"LC_CTYPE", "MGRPO_BOX", "PWD"} == {
            "OWN",
            "HOME",
            "TMPDIR",
            "PATH",
            "LANG",
            "PYTHONDONTWRITEBYTECODE",
        }
        assert names["HOME"] == box.folder

    with_box(walls, use)


def test_a_box_ends_with_all_that_is_in_it(walls, tmp_path, monkeypatch):
    """A run opens thousands; whatever each left would add up. Closing twice is ordinary in a `finally`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def run():
        async with opened(walls) as box:
            waiting = asyncio.create_task(sh(box, "setsid sleep 5432 & sleep 5432"))
            await until(lambda: len(running("5432")) >= 2)
            keeper = box._keeper.pid
            assert await box.alive()
            await asyncio.gather(box.close(), box.close())
            await box.close()
            with pytest.raises(BoxLost):
                await waiting
            for ask in (sh(box, "true"), box.put("a", b""), box.url_for("http://h:1"), box.end_processes()):
                with pytest.raises(BoxLost):
                    await ask
            assert not await box.alive()
        assert not running("5432") and not Path(f"/proc/{keeper}").exists()

    before = Path("/proc/self/mountinfo").read_text()
    descriptors = len(os.listdir("/proc/self/fd"))
    asyncio.run(run())
    assert list(tmp_path.iterdir()) == [] and Path("/proc/self/mountinfo").read_text() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_box_that_is_killed_is_lost(walls):
    """Its trajectory has no score, which is not the score 0."""

    async def use(box):
        waiting = asyncio.create_task(sh(box, "sleep 6543"))
        await until(lambda: bool(running("6543")))
        box._keeper.kill()
        with pytest.raises(BoxLost):
            await waiting
        assert not await box.alive()
        await box.close()
        await until(lambda: not running("6543"))

    with_box(walls, use)


def test_nothing_outlives_a_worker_that_is_killed(walls, tmp_path):
    """kill -9 leaves nobody to clean up: the kernel must, or the box's own keeper."""
    script = f"""if True:
        import asyncio, tempfile
        from mgrpo.environments.boxes.box import Bounds
        from mgrpo.environments.boxes.local.local_box import open_local
        tempfile.tempdir = {str(tmp_path)!r}
        async def main():
            box = await open_local(Bounds(), walls=[{walls!r}])
            await box.start(["sh", "-c", "echo x > file; (setsid sleep 8765 &); sleep 8765 & sleep 8765"])
            print("started", flush=True)
            await asyncio.sleep(1000)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline() == b"started\n"
        wait_until(lambda: len(running("8765")) >= 3)
        os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not running("8765") and list(tmp_path.iterdir()) == [])


def test_what_a_killed_keeper_leaves_is_removed_at_the_next_start(tmp_path, monkeypatch):
    """Without walls nothing ends a box's processes when its keeper is killed, and its folder stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def run():
        async with opened("none") as living:
            box = await open_local(SMALL, walls=["none"])
            process = await box.start(["sh", "-c", "(setsid sleep 9876 &); sleep 9876"])
            await until(lambda: len(running("9876")) >= 2)
            monkeypatch.setattr(leftover, "clear", lambda _: None)
            box._keeper.kill()
            with pytest.raises(BoxLost):
                await process.wait()
            await box.close()
            monkeypatch.undo()
            monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
            for folder in tmp_path.iterdir():
                os.utime(folder, (1, 1))
            assert running("9876") and len(list(tmp_path.iterdir())) == 2
            await check_box("none", SMALL)
            assert not running("9876") and [str(each) for each in tmp_path.iterdir()] == [
                os.path.dirname(living.folder)
            ]
            assert (await sh(living, "echo on")).stdout == b"on\n"

    asyncio.run(run())


def test_what_an_agent_needs_of_this_machine_is_shown(tmp_path):
    """Its own program and an environment of its packages, under their names and read-only."""
    skip_without_namespaces()
    shown = tmp_path / "project"
    shown.mkdir()
    (shown / "agent.py").write_text("print('ran')")
    for folder in (shown, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and str(folder) != "/tmp":
            folder.chmod(folder.stat().st_mode | 0o055)

    async def use(box):
        assert await python(box, f"exec(open('{shown}/agent.py').read())") == "ran"
        assert (await sh(box, f"touch {shown}/new || touch {shown}/agent.py")).status != 0
        assert (await sh(box, f"ls {tmp_path}")).stdout == b"project\n"
        assert (await sh(box, "touch /tmp/x /dev/shm/y && ls /tmp | grep -cx '[xy]'")).stdout == b"2\n"

    with_box("user", use, Bounds(readable=(str(shown),)))
    for path in ("/", "/tmp", "/dev/sda", "/box"):
        with pytest.raises(ValueError, match="cannot be shown"):
            asyncio.run(open_local(Bounds(readable=(path,))))


def test_an_image_folder_is_the_root(tmp_path):
    """A root file system that was unpacked is what the agent sees, without any file of this machine."""
    skip_without_namespaces()
    busy = shutil.which("busybox") or shutil.which("dash")
    image = Path(tempfile.mkdtemp(dir=tmp_path))
    _make_image(image, busy)

    async def use(box):
        done = await box.exec(
            ["/bin/sh", "-c", "echo /*; echo /etc/*; echo x > /etc/y; echo z > f; read a < f; echo $a"],
            timeout_s=PLENTY_S,
        )
        assert done.stdout.decode().split("\n")[:2] == [
            "/bin /box /dev /etc /lib /lib64 /proc /tmp /usr",
            "/etc/release",
        ], done
        assert b"Read-only" in done.stderr and done.stdout.endswith(b"z\n")

    with_box("user", use, Bounds(image=str(image)))
    assert sorted(os.listdir(image / "etc")) == ["release"]
    with pytest.raises(ValueError, match="which has its own /usr"):
        asyncio.run(open_local(Bounds(image=str(image), readable=("/usr/share",))))
    with pytest.raises(ValueError, match="is not a folder"):
        asyncio.run(open_local(Bounds(image=str(image / "none"))))


def _make_image(image: Path, shell: str) -> None:
    """A shell and its libraries."""
    for name in ("bin", "etc", "lib", "lib64", "usr", "proc", "root-only"):
        (image / name).mkdir()
    (image / "root-only").rmdir()
    image.chmod(0o755)
    (image / "etc/release").write_text("own")
    shutil.copy(shell, image / "bin/sh")
    listed = subprocess.run(["ldd", shell], capture_output=True, text=True, check=False).stdout
    for word in listed.split():
        if word.startswith("/"):
            (image / word[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, image / word[1:])


def test_an_ordinary_user_has_the_same_boxes():
    """Most machines run the workers as an ordinary user; keeper and agent then share one user id."""
    script = """
import asyncio, time
from mgrpo.environments.boxes.box import Bounds, MIB
from mgrpo.environments.boxes.local.local_box import open_local
async def main():
    box = await open_local(Bounds(max_processes=20))
    done = await box.exec(["sh", "-c", "id -u; pwd; kill -9 1; cat /proc/1/environ /proc/1/mem; touch /usr/x; echo on"], timeout_s=60)
    attempt = "import os\\ntry:\\n  for _ in range(200):\\n    os.fork() or __import__('time').sleep(100)\\nexcept OSError: print('no more')\\nelse: __import__('time').sleep(100)"
    bomb = await box.exec(["python", "-S", "-c", attempt], timeout_s=60)
    await box.end_processes()
    await box.put("a", b"1"); kept = await box.get("a", max_bytes=10)
    await box.close()
    print(json.dumps([os.geteuid(), done.stdout.decode().split(), (bomb.stdout + bomb.stderr).decode(), kept.decode()]))
asyncio.run(main())
"""
    user, said, bomb, kept = json.loads(run_as_somebody(script))
    assert user == 4711 and said == ["60600", "/box", "on"] and kept == "1"
    # The kernel does not count the processes of a user who is root outside, as in this test: then the keeper ends them.
    assert bomb == "no more\n" or "the box had more than 20 processes" in bomb


def test_a_machine_that_forbids_namespaces_says_what_to_do():
    """There an agent could do whatever the worker can, and only its owner may accept that."""
    script = """
import asyncio
from mgrpo.environments.boxes.box import Bounds
from mgrpo.environments.boxes.opening import open_box
Path("/proc/sys/user/max_user_namespaces").write_text("0")
linux.drop_capabilities()
async def main():
    try: await open_box("local", Bounds())
    except ValueError as err: refusal = str(err)
    box = await open_box("none", Bounds())
    done = await box.exec(["echo", "on"], timeout_s=60)
    await box.close()
    print(json.dumps([refusal, done.stdout.decode()]))
asyncio.run(main())
"""
    skip_without_namespaces()
    refusal, said = json.loads(run_as_somebody(script))
    assert (
        "agent_box=none" in refusal and "user: [Errno 28] unshare" in refusal and "sysctl" in refusal and said == "on\n"
    )


def test_a_box_that_does_not_open_in_time_leaves_nothing(tmp_path, monkeypatch):
    """Opening has a limit of its own, which a slow disk or a full machine reaches."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="not ready after 0 s"):
        asyncio.run(open_local(Bounds(start_timeout_s=0.0), walls=["none"]))
    wait_until(lambda: list(tmp_path.iterdir()) == [])


def test_many_boxes_at_once(walls):
    """Each of a batch's trajectories has its own."""

    async def one(number: int) -> str:
        box = await open_box("none" if walls == "none" else "local", Bounds(memory_bytes=512 * MIB))
        try:
            await box.put("own", str(number).encode())
            return (await sh(box, "cat own")).stdout.decode()
        finally:
            await box.close()

    async def run():
        return await asyncio.gather(*map(one, range(24)))

    assert asyncio.run(run()) == [str(number) for number in range(24)]


def test_a_sweep_follows_no_link(tmp_path, monkeypatch):
    """Any user may put one into /tmp; what it names got other permissions."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    own = tmp_path / "own"
    own.mkdir()
    (own / "key").write_text("secret")
    (own / "key").chmod(0o400)
    link = tmp_path / "tmp" / "mgrpo-box-x"
    link.symlink_to(own)
    left = tmp_path / "tmp" / "mgrpo-box-y"
    (left / "work").mkdir(parents=True)
    for path in (own, left):
        os.utime(path, (1, 1))
    leftover.sweep()
    assert (own / "key").stat().st_mode & 0o777 == 0o400 and link.is_symlink()
    assert not left.exists(), "what a killed keeper has left goes"
    with pytest.raises(OSError):
        leftover._is_left(link)


def test_what_lies_behind_a_link_at_the_top_needs_no_mount():
    """Where /bin is a link into /usr, /bin/sh was to be mounted over that, which only root may."""
    shown = {"/usr": "/usr", "/bin": "/bin", "/bin/sh": "/bin/sh", "/usr/bin/dash": "/bin/sh", "/opt/tool": "/opt/tool"}
    assert sorted(sight.mounted(shown, {"/bin": "usr/bin"})) == ["/opt/tool", "/usr"]


def test_an_ordinary_user_may_name_a_shell_by_the_path_behind_a_link():
    script = """
import asyncio
from mgrpo.environments.boxes.box import Bounds
from mgrpo.environments.boxes.opening import open_box
linux.drop_capabilities()
async def main():
    box = await open_box("local", Bounds(readable=("/bin/sh",)))
    print((await box.exec(["/bin/sh", "-c", "echo $0"], timeout_s=60)).stdout.decode())
    await box.close()
asyncio.run(main())
"""
    skip_without_namespaces()
    assert run_as_somebody(script).strip() == "/bin/sh"
