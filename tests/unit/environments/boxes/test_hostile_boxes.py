"""Agents that try to get out of their box, to stay, or to take the machine with them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import time
from pathlib import Path

import pytest

from mgrpo.environments.boxes.box import MIB, Bounds
from tests.namespaces import skip_without_namespaces
from tests.unit.environments.boxes.boxed import PLENTY_S, SMALL, python, served, sh, with_box

TRY = """
import ctypes, errno, json, os, resource, signal, socket, sys
found = {}
def attempt(name, action, *arguments):
    try:
        action(*arguments)
    except (OSError, OverflowError, ValueError):
        found[name] = False
    else:
        found[name] = True
def read(path):
    with open(path, "rb") as file: return file.read(1)
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1: raise OSError(ctypes.get_errno(), name)
"""


@pytest.fixture(params=["user"] if os.geteuid() else ["user", "root"], autouse=True)
def walls(request) -> str:
    skip_without_namespaces()
    return request.param


async def _attempts(box, script: str) -> dict[str, bool]:
    return json.loads(await python(box, f"{TRY}\n{script}\nprint(json.dumps(found))"))


def test_nothing_of_the_machine_is_reached(walls, tmp_path):
    """The owner's files, processes and sockets are the machine's, not the agent's."""
    marker = tmp_path / "marker"
    marker.write_text("secret")
    marker.chmod(0o644)
    name = f"\0mgrpo-test-{secrets.token_hex(8)}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        script = f"""
for path in ({str(marker)!r}, "/etc/shadow", "/root/.bashrc", "/proc/1/environ", "/proc/1/mem", "/proc/1/maps",
             "/proc/kcore", "/proc/sys/kernel/core_pattern", "/sys/kernel/notes", "/dev/kmsg", "/dev/mem", "/proc/1/root/etc/passwd",
             "/proc/1/fd/0", "/proc/1/cwd/etc/passwd"):
    attempt(path, read, path)
for folder in ("/", "/usr", "/etc", "/dev", "/usr/lib", "/bin", os.path.dirname(os.__file__), "/proc", "/var/tmp", "/run"):
    attempt("write " + folder, lambda: open(folder + "/mgrpo-probe", "w"))
attempt("own", lambda: open("mgrpo-probe", "w"))
for pid in ({os.getpid()}, {os.getppid()}, 1):
    attempt(f"kill {{pid}}", os.kill, pid, 9)
attempt("tcp", socket.create_connection, ("127.0.0.1", {server.getsockname()[1]}), 5)
attempt("outside", socket.create_connection, ("1.1.1.1", 80), 5)
def connect():
    with socket.socket(socket.AF_UNIX) as end: end.connect({name!r})
attempt("abstract", connect)
for kind in ((socket.AF_NETLINK, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW), (socket.AF_INET, socket.SOCK_RAW), (socket.AF_UNIX, socket.SOCK_DGRAM), (40, 1)):
    attempt(str(kind), socket.socket, *kind)
"""
        found = with_box(walls, lambda box: _attempts(box, script))
        # Signals to the box's first process are allowed where agent and keeper are one user, and have no effect.
        assert [name for name, is_through in found.items() if is_through and name != "kill 1"] == ["own"]


def test_no_privilege_is_gained(walls):
    """With a capability, or a namespace in which it has all, a program could take the walls down."""
    script = """
attempt("setuid", os.setuid, 0)
attempt("user namespace", call, "unshare", 0x10000000)
attempt("mount namespace", call, "unshare", 0x20000)
attempt("mount", call, "mount", b"none", b"/tmp", b"tmpfs", 0, None)
attempt("remount", call, "mount", b"none", b"/usr", None, ctypes.c_ulong(0x20 | 0x1000), None)
attempt("unmount", call, "umount2", b"/tmp", 2)
attempt("chroot", os.chroot, "/tmp")
attempt("chown", os.chown, "/box", 0, 0)
attempt("ptrace", call, "ptrace", 16, 1, None, None)
attempt("hostname", socket.sethostname, "x")
attempt("device", os.mknod, "/box/null", 0o20666, os.makedev(1, 3))
attempt("limits", resource.setrlimit, resource.RLIMIT_NPROC, (10**6, 10**6))
attempt("limits of 1", resource.prlimit, 1, resource.RLIMIT_NOFILE, (1, 1))
attempt("handle", call, "open_by_handle_at", 3, None, 0)
capabilities = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), capabilities)
found["capabilities"] = any(capabilities)
found["root"] = 0 in os.getresuid() + os.getresgid() + tuple(os.getgroups())
os.system("cp /bin/sh /box/sh; chmod 4755 /box/sh")
found["set-user-id"] = bool(os.stat("/box/sh").st_uid == 0)
"""
    found = with_box(walls, lambda box: _attempts(box, script))
    assert [name for name, is_through in found.items() if is_through] == []


def test_no_secret_of_the_worker_is_seen(walls, monkeypatch):
    """The run's keys are in the worker's environment and arguments; an agent could send them anywhere by its final message."""
    secret = secrets.token_hex(16)
    monkeypatch.setenv("MGRPO_TEST_SECRET", secret)
    script = f"""
import glob
seen = []
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/mem"):
    try: seen.append(open(path, "rb").read(10**6))
    except OSError: pass
print(any({secret[:16]!r}.encode() + {secret[16:]!r}.encode() in each for each in seen), len(seen) > 1)
"""
    assert with_box(walls, lambda box: python(box, script)) == "False True"


def test_links_lead_nowhere(walls, tmp_path):
    """What reads and writes files for the run has the agent's rights, within its walls."""
    marker = tmp_path / "marker"
    marker.write_text("secret")
    marker.chmod(0o666)
    tmp_path.chmod(0o777)

    async def use(box):
        await sh(
            box,
            f"ln -s {marker} file; ln -s {tmp_path} folder; ln -s / root; ln -s /etc/shadow shadow; ln -s loop loop",
        )
        for path in (
            "file",
            "folder/marker",
            f"root{marker}",
            "shadow",
            f"../../..{marker}",
            str(marker),
            "/proc/1/root" + str(marker),
            "loop",
        ):
            with pytest.raises(OSError):
                await box.get(path, max_bytes=100)
        for path in ("folder/new", "file", f"..{marker}", "root/usr/new", "/etc/passwd", "loop"):
            try:
                await box.put(path, b"changed")
            except OSError:
                continue
            assert (await box.get(path, max_bytes=100)) == b"changed"  # a place of its own in the box
        assert marker.read_text() == "secret" and [each.name for each in tmp_path.iterdir()] == ["marker"]

    with_box(walls, use)


def test_a_fork_bomb_ends_with_its_box(walls):
    """Processes are bounded, and no one outruns the end: neither by a session of its own nor by forking on."""
    bomb = "import os\nwhile True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: pass"

    async def use(box):
        done = await box.exec(["python", "-S", "-c", bomb], timeout_s=2.0)
        assert done.timed_out or done.status != 0
        assert len(_of_box(box)) <= SMALL.max_processes + 3
        await box.end_processes()
        assert (await sh(box, "echo on")).stdout == b"on\n"
        await box.start(["python", "-S", "-c", bomb])
        await asyncio.sleep(0.5)
        keeper = _of_box(box)
        await box.close()
        assert not [pid for pid in keeper if Path(f"/proc/{pid}").exists()]

    with_box(walls, use)


def test_memory_is_bounded(walls):
    """By one process, by many, and by files; the box goes on, and its owner is told."""
    one = "x = bytearray(600 * 2**20)"
    many = "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n    x = b'1' * (100 * 2**20)\n    time.sleep(100)\ntime.sleep(100)"
    sockets = """if True:
        import socket, time
        held = []
        while True:
            a, b = socket.socketpair()
            a.setblocking(False)
            try:
                while True: a.send(b"x" * 65536)
            except OSError: held.append((a, b))
    """

    async def use(box):
        alone = await box.exec(["python", "-S", "-c", one], timeout_s=PLENTY_S)
        assert alone.status != 0 and (b"MemoryError" in alone.stderr or b"MiB of memory" in alone.stderr)
        together = await box.exec(["python", "-S", "-c", many], timeout_s=PLENTY_S)
        assert together.status == -signal.SIGKILL and b"the box used more than 512 MiB of memory" in together.stderr
        full = await box.exec(["python", "-S", "-c", sockets], timeout_s=PLENTY_S)
        assert full.status != 0 and not full.timed_out, full
        assert (await sh(box, "echo on")).stdout == b"on\n"

    with_box(walls, use)


def test_disk_is_bounded(walls):
    """In the working folder, /tmp and /dev/shm together, in bytes and in files; removing makes room again."""

    async def use(box):
        done = await sh(
            box,
            "head -c 10000000 /dev/full > a && head -c 4000000 /dev/full > /tmp/b && head -c 10000000 /dev/full > /dev/shm/c",
        )
        assert done.status != 0 and b"No space left" in done.stderr
        await sh(box, "rm -f a /tmp/b /tmp/c")
        files = "import itertools\nfor n in itertools.count():\n  open(f'f{n}', 'w')"
        done = await box.exec(["python", "-S", "-c", files], timeout_s=PLENTY_S)
        assert b"No space left" in done.stderr
        with pytest.raises(OSError, match="No space left"):
            await box.put("more", b"x" * 20_000_000)
        await sh(box, "find . -type f -delete")
        await box.put("again", b"1")

    with_box(walls, use)


def test_the_endpoint_is_all_that_the_relay_reaches(walls):
    """The relay's owner can reach everything; it passes on to one address, however many connect and whatever they send."""
    script = """if True:
        import socket, sys
        address = ("127.0.0.1", int(sys.argv[1]))
        silent = [socket.create_connection(address) for _ in range(50)]
        with socket.create_connection(address) as raw:
            raw.sendall(b"CONNECT 1.1.1.1:80 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
            print(raw.recv(100).split(b"\\r\\n")[0])
        for one in silent: one.close()
    """

    async def use(box):
        with served() as url:
            port = (await box.url_for(url)).rsplit(":", 1)[1]
            done = await box.exec(["python", "-S", "-c", script, port], timeout_s=PLENTY_S)
            assert b"501" in done.stdout, done
            with pytest.raises(ValueError, match="agent_network=true"):
                await box.url_for("https://example.com/v1")
        dead = "import urllib.request, sys\ntry: urllib.request.urlopen(sys.argv[1], timeout=20)\nexcept OSError as err: print(type(err).__name__)"
        done = await box.exec(["python", "-c", dead, f"http://127.0.0.1:{port}"], timeout_s=PLENTY_S)
        assert done.stdout.decode().strip() in ("ConnectionResetError", "RemoteDisconnected", "URLError"), done

    with_box(walls, use)


def test_the_network_is_reached_where_it_is_allowed(walls):
    """Some agents need it, and their owner says so."""

    async def use(box):
        with served() as url:
            assert await box.url_for(url) == url
            script = f"import urllib.request; print(urllib.request.urlopen('{url}/a', b'x').read().decode())"
            return (await box.exec(["python", "-c", script], timeout_s=PLENTY_S)).stdout

    assert with_box(walls, use, Bounds(network=True)) == b"/a x\n"


def test_a_command_cannot_speak_for_the_keeper(walls):
    """Its connection to the owner is closed in every command, and what commands print is only text."""
    script = """
for number in range(3, 300):
    attempt(str(number), os.write, number, b'{"id": 1, "status": 0, "why": ""}')
found["open"] = len(os.listdir("/proc/self/fd")) > 4
"""
    found = with_box(walls, lambda box: _attempts(box, script))
    assert not any(found.values())


def test_boxes_do_not_meet(walls):
    """Two trajectories of a group would otherwise copy from each other."""

    async def use(box):
        other_box = await _another(walls)
        try:
            await sh(box, "echo mine > /tmp/shared; echo mine > shared; sleep 999 &")
            done = await sh(other_box, "ls -A /tmp /box; kill -9 -1; ls -d /proc/[0-9]*")
            assert b"shared" not in done.stdout and len(done.stdout.split()) <= 6
            assert (await sh(box, "cat shared; ls -d /proc/[0-9]* | wc -l")).stdout.split()[0] == b"mine"
        finally:
            await other_box.close()

    with_box(walls, use)


async def _another(walls: str):
    from mgrpo.environments.boxes.local.local_box import open_local

    return await open_local(Bounds(memory_bytes=512 * MIB), walls=[walls])


def _of_box(box) -> list[int]:
    from mgrpo.processes.lifetime import children

    found = [box._keeper.pid]
    for pid in found:
        found += children(pid)
    return found


def test_time_in_a_box_is_not_the_loops(walls):
    """A command that prints without end must not keep this process from serving the others."""

    async def use(box):
        noisy = [await box.start(["yes", "x" * 1000]) for _ in range(4)]
        turns, ends = 0, time.monotonic() + 1.0
        while time.monotonic() < ends:
            await asyncio.sleep(0)
            turns += 1
        for process in noisy:
            await process.kill()
            assert len((await process.wait(PLENTY_S)).stdout) == SMALL.output_bytes
        return turns

    assert with_box(walls, use) > 100
