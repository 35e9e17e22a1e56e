"""The state of the tool python: nothing that one trajectory did is seen by another, before, beside or after it, whoever is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator

import psutil
import pytest

from mgrpo.environments.environment import Observation
from mgrpo.environments.tools.python import Python
from mgrpo.processes.lifetime import children
from mgrpo.sandbox.local import borrow_kernels, give_back_kernels
from tests.namespaces import skip_without_namespaces
from tests.unit.environments.test_python_tool import MEMORY_MB, PLENTY_S, opened, turn


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Held for all tests of this file, so that the walls rise once."""
    skip_without_namespaces()
    yield borrow_kernels(MEMORY_MB, accept_risk=False)
    give_back_kernels(MEMORY_MB, accept_risk=False)


def run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def said(tool: Python, code: str) -> str:
    return (await turn(tool, code))[0].text


PLANTED = r"""
import builtins, collections, ctypes, gc, json, locale, math, os, random, re, resource, signal, socket, subprocess, sys, threading, time
SECRET = "planted-4711"
kept = []
def attempt(act):
    try:
        kept.append(act())
    except BaseException as err:
        kept.append(err)

# What an interpreter is made of.
builtins.planted = SECRET
builtins.len = lambda *a: 4711
builtins.print, own_print = lambda *a, **k: None, print
math.sqrt = lambda x: 4711
json.dumps = lambda *a, **k: SECRET
collections.ChainMap.planted = SECRET
sys.modules["planted"] = math
sys.path.insert(0, "/planted")
sys.setrecursionlimit(4711)
random.seed(4711)
os.environ["PLANTED"] = SECRET
ctypes.CDLL(None).setenv(b"PLANTED_C", SECRET.encode(), 1)
os.umask(0o077)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.settrace(None); sys.excepthook = print
attempt(lambda: ctypes.memset(id(256) + 24, 17, 1))
attempt(lambda: sys.addaudithook(lambda *a: None))

# Files, wherever one can be made.
for place in (".", "/tmp", "/dev/shm", "/var/tmp", "/run", os.path.expanduser("~"), os.path.dirname(os.__file__), *sys.path, "/", "/dev", "/proc/self"):
    for name in ("planted", "sitecustomize.py", "usercustomize.py", "math.py", "planted.pth", ".pythonrc"):
        attempt(lambda: open(os.path.join(place, name), "w").write(SECRET))
attempt(lambda: os.makedirs(".local/lib/python3.11/site-packages"))
attempt(lambda: os.symlink("/", "root"))
attempt(lambda: os.mkfifo("pipe"))

# What the kernel keeps.
libc = ctypes.CDLL(None, use_errno=True)
attempt(lambda: libc.shmget(4711, 4096, 0o1666))
attempt(lambda: libc.semget(4711, 1, 0o1666))
attempt(lambda: libc.msgget(4711, 0o1666))
attempt(lambda: libc.prctl(15, b"planted", 0, 0, 0))
for family, address in ((socket.AF_UNIX, "\0planted"), (socket.AF_UNIX, "planted.sock"), (socket.AF_INET, ("127.0.0.1", 47110))):
    def listen():
        server = socket.socket(family); server.bind(address); server.listen(); return server
    attempt(listen)
attempt(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50)))

# What goes on by itself.
def busy():
    while True:
        for place in (".", "/tmp", "/dev/shm"):
            try:
                open(place + "/still there", "a").write(SECRET)
            except OSError:
                pass
        time.sleep(0.01)
threading.Thread(target=busy, daemon=True).start()
for flags in (0, 1):
    if os.fork() == 0:
        if flags:
            os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        busy()
attempt(lambda: os.chdir("/tmp"))
own_print("planted")
"""

SEEN = r"""
import builtins, collections, ctypes, json, math, os, random, resource, signal, socket, sys, threading
def tried(act):
    try:
        return act()
    except BaseException as err:
        return type(err).__name__
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
def connected(family, address):
    with socket.socket(family) as client:
        client.connect(address)
        return "connected"
def files(place):
    return sorted(os.listdir(place))
found = {
    "names": sorted(name for name in globals() if not name.startswith("__")),
    "builtins": sorted(vars(builtins)),
    "builtin functions": [builtins.len([1]), repr(builtins.print), 256 + 0],
    "modules": [math.sqrt(4), json.dumps([1]), hasattr(collections.ChainMap, "planted"), "planted" in sys.modules],
    "path": sys.path,
    "limit": sys.getrecursionlimit(),
    "random": random.random(),
    "environment": dict(os.environ),
    "environment of C": str(libc.getenv(b"PLANTED_C")),
    "umask": os.umask(0o022),
    "signal": repr(signal.getsignal(signal.SIGTERM)),
    "cwd": os.getcwd(),
    "files": {place: tried(lambda: files(place)) for place in (".", "/tmp", "/dev/shm", "/var/tmp", "/run", "/", "/dev", os.path.expanduser("~"))},
    "importable": [tried(lambda name=name: __import__(name).__name__) for name in ("planted", "sitecustomize", "usercustomize")],
    "shm": tried(lambda: libc.shmget(4711, 4096, 0o666) >= 0), "sem": tried(lambda: libc.semget(4711, 1, 0o666) >= 0),
    "msg": tried(lambda: libc.msgget(4711, 0o666) >= 0),
    "sockets": [tried(lambda: connected(socket.AF_UNIX, "\0planted")), tried(lambda: connected(socket.AF_INET, ("127.0.0.1", 47110)))],
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "threads": threading.active_count(),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:3],
    "room": os.statvfs(".").f_bfree,
    "user": os.getuid() > 0,
}
for name in sorted(found):
    print(name, found[name])
"""


def test_nothing_that_a_trajectory_did_is_seen_by_another():
    """The answer of one prompt would be an example to the next one, and one user's data another user's."""

    async def go() -> None:
        async with opened() as tool, opened() as beside:
            for each in (tool, beside):
                await each.reset({}, seed=0)
            untouched = await said(tool, SEEN)
            assert untouched.count("\n") == 24 and "Traceback" not in untouched, untouched
            await tool.reset({}, seed=0)
            assert "planted\n" in await said(tool, PLANTED)
            planted = await said(tool, "own_print(kept); own_print(os.listdir('/tmp'), planted)")
            assert "planted-4711" in planted, planted
            assert await said(beside, SEEN) == untouched, "a trajectory at the same time"
            await tool.end()
            await tool.reset({}, seed=0)
            assert await said(tool, SEEN) == untouched, "the next trajectory of the same tool"
            async with opened() as later:
                await later.reset({}, seed=0)
                assert await said(later, SEEN) == untouched, "another tool"

    run(go())


def test_a_trajectory_that_fills_its_disk_or_memory_takes_none_of_anothers():
    """A kernel between two calls would keep half a gigabyte, and the walls' disk is memory."""
    fill = """
import os
try:
    for number in range(10**6):
        with open(f"full {number}", "wb") as file:
            file.write(b"x" * (1 << 20))
except OSError as err:
    print(err.strerror)
"""

    async def go() -> None:
        async with opened() as tool, opened() as beside:
            for each in (tool, beside):
                await each.reset({}, seed=0)
            room = await said(beside, "import os\nos.statvfs('.').f_bavail")
            full = (await turn(tool, fill))[0].text
            assert "No space left on device" in full or "more memory or processes than it may" in full
            assert await said(beside, "os.statvfs('.').f_bavail") == room
            held = (await turn(tool, f"x = bytearray({MEMORY_MB} << 20)"))[0]
            assert held.failed
            assert await said(beside, "y = bytearray(64 << 20); len(y)") == f"{64 << 20}\n"
            await tool.reset({}, seed=0)
            assert await said(tool, "import os\nos.statvfs('.').f_bavail") == room

    run(go())


def descendants(pid: int) -> Iterator[psutil.Process]:
    """The processes below one, from the top down."""
    for child in children(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(child)
            yield from descendants(child)


def depth(process: psutil.Process) -> int:
    return len(process.parents())


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


PLACES: dict[str, Callable[[list[psutil.Process]], psutil.Process]] = {
    "the process inside the walls": lambda below: min(below, key=depth),
    "the kernel's supervisor": lambda below: sorted(below, key=depth)[-2],
    "the interpreter": lambda below: max(below, key=depth),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_process_of_the_sandbox_that_is_killed_in_a_call_costs_that_trajectory(place):
    """The call is told that its interpreter is lost, the tool goes on with a new one, and no process is left over."""

    async def go() -> None:
        others = {process.pid for process in descendants(os.getpid())}
        async with opened(memory_mb=MEMORY_MB + 1) as tool:  # kernels of its own
            before = {process.pid for process in descendants(os.getpid())}
            await tool.reset({}, seed=0)
            assert await said(tool, "x = 1; x") == "1\n"
            call = asyncio.create_task(turn(tool, "import time\ntime.sleep(60)"))
            await asyncio.sleep(0.2)
            below = [process for process in descendants(os.getpid()) if process.pid not in others]
            PLACES[place](below).send_signal(signal.SIGKILL)
            (observation,) = await asyncio.wait_for(call, PLENTY_S)
            assert observation.failed and "all names and files" in observation.text
            assert await said(tool, "'x' in dir()") == "False\n"
            await tool.end()
            gone = [process for process in below if process.pid not in before]
            end = asyncio.get_running_loop().time() + PLENTY_S
            while left := [process for process in gone if is_alive(process)]:
                assert asyncio.get_running_loop().time() < end, left
                await asyncio.sleep(0.01)
            await tool.reset({}, seed=0)
            assert await turn(tool, "6 * 7") == [Observation(text="42\n")]

    run(go())
