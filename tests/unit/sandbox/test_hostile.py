"""Hostile programs: what they try fails, and nothing of them is left.

Most report by what they print whether they got through, so that a sandbox that merely breaks them is not taken for a wall.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgrpo.sandbox.cases import StdioTest
from mgrpo.sandbox.sandbox import Sandbox
from tests.unit.sandbox.conftest import SECRET

LIMIT_S = 1.0
# For programs that end by themselves, on a machine that does other things.
PLENTY_S = 20.0

REFUSED = {
    "reading /etc/passwd": "open('/etc/passwd').read()",
    "reading it through a link": "os.symlink('/etc/passwd', 'link'); open('link').read()",
    "reading it through the root of another process": "open('/proc/1/root/etc/passwd').read()",
    "the environment of init": "open('/proc/1/environ').read() or missing",
    "the memory of init": "open('/proc/1/mem', 'rb').read(1)",
    "the files of init": "os.listdir('/proc/1/fd')",
    "keys": "os.listdir('/root/.ssh')",
    "home folders": "os.listdir('/home')",
    "the caller's files": f"open({__file__!r})",
    "disks": "open('/dev/sda'); open('/dev/vda')",
    "writing in the root folder": "open('/mgrpo-hostile', 'w')",
    "writing in /var/tmp": "open('/var/tmp/mgrpo-hostile', 'w')",
    "writing in the standard library": "open(os.path.join(os.path.dirname(os.__file__), 'mgrpo-hostile.py'), 'w')",
    "changing the standard library": "os.remove(os.__file__)",
    "writing through /proc": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "connecting to this machine": "socket.create_connection(('127.0.0.1', 22), 2)",
    "connecting to the world": "socket.create_connection(('192.0.2.1', 80), 2)",
    "looking up a name": "socket.getaddrinfo('example.com', 80)",
    "listening": "socket.create_server(('127.0.0.1', 0))",
    "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "another user": "os.setuid(0)",
    "another root folder": "os.chroot('/tmp')",
    "mounting": "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, b''))",
    "unmounting": "check(libc.umount2(b'/proc', 2))",
    "a user namespace": "check(libc.unshare(0x10000000))",
    "tracing init": "check(libc.ptrace(16, 1, 0, 0))",
    "killing init": "os.kill(1, 9); os.kill(1, 0); time.sleep(0.2); os.getppid() == 1 and missing",
    "a higher limit": "resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))",
    "setting the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "a big file": "open('big', 'wb').write(bytes(2**26))",
    "much memory": "bytearray(2**30)",
    "memory outside of every process": "check(libc.memfd_create(b'x', 0))",
    "memory shared without a file": "mmap.mmap(-1, 4096)",
    "memory shared as zeros": "open('/dev/zero', 'r+b')",
    "memory of semaphores": "check(libc.semget(0, 32000, 0o1600))",
    "memory of pages given to a pipe": "check(libc.vmsplice(os.pipe()[1], (ctypes.c_size_t * 2)(id(time), 8), 1, 0))",
    "memory of datagrams": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "memory of messages": "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)",
    "a larger socket": "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)",
    "the machine's aio contexts": "check(libc.syscall(call(206, 0), 1, ctypes.byref(ctypes.c_ulong())))",
    "the user's inotify instances": "check(libc.inotify_init1(0))",
    "all files' events": "check(libc.fanotify_init(0x200, 0))",
    "a personality": "check(libc.personality(0x40000))",
    "where memory lies": "check(libc.syscall(call(237, 235), 0, 0, 0, None, 0, 0))",
    "rules for itself": "check(libc.syscall(444, ctypes.byref(ctypes.c_uint64(1)), 8, 0))",
    "a program": "subprocess.run(['/bin/sh', '-c', 'true'], check=True)",
}
"""One expression or statement each; it must raise."""

WITHOUT_SUCCESS = {
    "a fork bomb": "import os\nwhile True: os.fork()",
    "a fork bomb that sleeps": "import os, time\nfor _ in range(10000):\n  if os.fork() == 0: time.sleep(100)",
    "threads without end": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "killing everyone": "import os\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)",
    "killing the group": "import os\nos.killpg(0, 9)",
    "a deaf loop": "import signal\nfor n in set(range(1, 32)) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    "stopping": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "a list of 10 GB": "x = [0] * (10 * 2**30 // 8)",
    "memory in small steps": "x = []\nwhile True: x.append(bytearray(2**16))",
    "a big integer": "9**9**9",
    "endless output": "while True: print('A' * 10**5)",
    "endless errors": "import sys\nwhile True: sys.stderr.write('A' * 10**5)",
    "invalid UTF-8": "import os\nos.write(1, b'\\xff\\xfe\\x80' * 1000)",
    "NUL output": "print('\\0' * 10**5)",
    "closing everything": "import os\nos.closerange(0, 10**5)\nwhile True: pass",
    "leaving at once": "import os\nos._exit(0)",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "an abort": "import os\nos.abort()",
    "recursion without end": "def f(): return f()\nf()",
    "a NUL in the source": "print('right')\0",
    "nested syntax": "x = " + "(" * 5000 + "1" + ")" * 5000,
    "half a surrogate": "print('right') # \ud800",
    "a daemon": "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)\n",
    "many files": "n = 0\nwhile True:\n  open(str(n), 'w').close()\n  n += 1",
    "deep folders": "import os\nwhile True:\n  os.mkdir('d')\n  os.chdir('d')",
    "all scratch space": "n = 0\nwhile True:\n  open(str(n), 'wb').write(bytes(2**20))\n  n += 1",
}
"""Whatever they do, they do not print the right answer."""

FORGERIES = {
    "leaving with success": "import os\nos._exit(0)",
    "leaving in order": "raise SystemExit(0)",
    "leaving during the test": "import os\ndef f(): os._exit(0)",
    "writing to every descriptor": "import os\nfor fd in range(1, 100):\n  try: os.write(fd, b'1' * 64)\n  except OSError: pass",
    "replacing what assert raises": "import builtins\nbuiltins.AssertionError = type('E', (), {})",
    "replacing builtins": "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None",
    "replacing __builtins__": "__builtins__ = {'abs': lambda x: 1}",
    "replacing what the verdict is sent with": "import os, struct\nos._exit = os.write = struct.pack = lambda *a: 1",
    "replacing abs for the test": "import builtins\nbuiltins.abs = lambda x: 1",
    "writing to every descriptor in the test": "import os\ndef f():\n  for fd in range(3, 100):\n"
    "    try: os.write(fd, b'1' * 24)\n    except OSError: pass",
    "skipping a line by tracing": "import sys\ndef skip(frame, event, arg):\n"
    "  if event == 'line' and frame.f_code.co_filename == '<test>' and frame.f_lineno == 2: frame.f_lineno = 3\n"
    "  return skip\nsys.settrace(skip)",
    "an exit handler": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
    "an exception hook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)",
    "printing the verdict": "print('{\"results\": [1]}', flush=True)",
    "looking for the test": textwrap.dedent(
        """
        import gc, os, sys

        frame, seen = sys._getframe(), []
        while frame:
            seen += map(repr, (frame.f_locals, frame.f_globals))
            frame = frame.f_back
        seen += [repr(thing)[:10000] for thing in gc.get_objects() if isinstance(thing, (list, tuple, dict, bytearray))]
        for descriptor in range(100):
            try:
                os.set_blocking(descriptor, False)
                seen.append(repr(os.read(descriptor, 10**6)))
            except OSError:
                pass
        if any("_".join(("wanted", "4711")) in text for text in seen):
            abs = lambda x: 1
        """
    ),
}
"""Programs that fail their test and want to be taken for right, without knowledge of the sandbox."""


def attempt(statement: str) -> str:
    """A program that prints whether the statement raised."""
    return "\n".join(
        [
            "import ctypes, mmap, os, resource, socket, subprocess, time",
            "libc = ctypes.CDLL(None, use_errno=True)",
            "def call(x86, arm): return x86 if os.uname().machine == 'x86_64' else arm",
            "def check(result):",
            "    if result < 0: raise OSError(ctypes.get_errno(), 'refused')",
            "try:",
            f"    {statement}",
            "except Exception: print('refused')",
            "else: print('got through')",
        ]
    )


@pytest.fixture(scope="module")
def outcomes(sandbox: Sandbox) -> Iterator[dict[str, tuple[list[int], list[int]]]]:
    """Verdicts of the programs without success, as script and before a test; they run two at a time."""
    before = Path("/proc/self/mountinfo").read_text()
    runs = {
        name: (
            sandbox.run_stdio(program, [StdioTest("", "right")], LIMIT_S),
            sandbox.run_asserts(program, ["assert False"], LIMIT_S),
        )
        for name, program in WITHOUT_SUCCESS.items()
    }
    yield {name: (first.result().results, second.result().results) for name, (first, second) in runs.items()}
    assert Path("/proc/self/mountinfo").read_text() == before


@pytest.mark.parametrize("name", REFUSED)
def test_a_wall_refuses(name, sandbox):
    """Each of these, once it works, gives a model's output the machine that trains it."""
    verdicts = sandbox.run_stdio(attempt(REFUSED[name]), [StdioTest("", "refused")], PLENTY_S).result()
    assert verdicts.results == [1]


@pytest.mark.parametrize("name", WITHOUT_SUCCESS)
def test_a_program_that_runs_wild_has_failed(name, outcomes):
    """It is wrong, which is a score; it costs the service neither its processes nor its memory."""
    assert outcomes[name] == ([0], [0])


@pytest.mark.parametrize("name", FORGERIES)
def test_a_cheap_forgery_does_not_pass(name, sandbox):
    """Reward hacking starts with what a model finds by chance: leaving early, printing, replacing builtins."""
    program = "def f(): return 1\n" + FORGERIES[name]
    verdicts = sandbox.run_asserts(program, ["f()\nassert abs(-2) == 1, 'wanted_4711'\nx = 1"], PLENTY_S).result()
    assert verdicts.results == [0]


def test_programs_see_nothing_of_the_service(sandbox):
    """Tokens of the hub and of trackers stand in the environment of a run."""
    program = "import os\nseen = repr(os.environ)\nfor p in os.listdir('/proc'):\n"
    program += (
        "  for f in ('environ', 'cmdline'):\n    try: seen += open(f'/proc/{p}/{f}').read()\n    except OSError: pass\n"
    )
    program += f"print({SECRET!r} in seen, 'PATH' in seen, len([p for p in os.listdir('/proc') if p.isdecimal()]) <= 2)"
    assert sandbox.run_stdio(program, [StdioTest("", "False True True")], PLENTY_S).result().results == [1]


def test_the_processes_of_a_program_share_its_memory(sandbox):
    """Each below its limit, 64 processes together would take 64 times the memory."""
    program = (
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n    x = b'x' * (200 * 2**20)\n    time.sleep(100)\n"
    )
    program += "time.sleep(15)\nprint('right')"
    verdicts = sandbox.run_stdio(program, [StdioTest("", "right")], PLENTY_S).result()
    assert verdicts.results == [0]


def test_other_families_of_sockets_never_reach_the_kernel(sandbox):
    """Each is a driver of its own; the filter refuses (EPERM) what the kernel would look at first."""
    program = (
        "import ctypes, errno\nlibc, seen = ctypes.CDLL(None, use_errno=True), set()\npair = (ctypes.c_int * 2)()\n"
    )
    program += (
        "for family in {*range(46)} - {1}:\n  libc.socketpair(family, 1, 0, pair)\n  seen.add(ctypes.get_errno())\n"
    )
    program += "print(*map(errno.errorcode.get, seen))"
    assert sandbox.run_stdio(program, [StdioTest("", "EPERM")], PLENTY_S).result().results == [1]


def test_full_sockets_count_as_memory(sandbox):
    """What waits in a socket belongs to no process, and every process may have as many as it has descriptors."""
    program = "import os, socket, time\nfor _ in range(24):\n  if os.fork() == 0:\n"
    program += "    held = [socket.socketpair() for _ in range(60)]\n    time.sleep(100)\n"
    program += "time.sleep(10)\nprint('right')"
    assert sandbox.run_stdio(program, [StdioTest("", "right")], PLENTY_S).result().results == [0]


def test_what_normal_programs_share_still_works(sandbox):
    """A filter that breaks the standard library scores correct programs 0."""
    program = """
import asyncio, mmap, multiprocessing as mp, os, socket, tempfile
from concurrent.futures import ProcessPoolExecutor

async def double(x):
    reader, writer = await asyncio.open_connection(sock=pair[0])
    writer.write(bytes([x]))
    await writer.drain()
    value = pair[1].recv(1)[0] * 2
    writer.close()
    return value

def work(value, queue, lock):
    with lock: value.value += 1
    queue.put(value.value)

if __name__ == "__main__":
    pair = socket.socketpair()
    got = [asyncio.run(double(21))]
    fork = mp.get_context("fork")
    value, queue, lock, array = fork.Value("i", 1), fork.Queue(), fork.Lock(), fork.Array("d", 1000)
    child = fork.Process(target=work, args=(value, queue, lock))
    child.start()
    got += [queue.get(), child.join(), array[999]]
    ours, theirs = fork.Pipe()
    ours.send("x")
    got.append(theirs.recv())
    with fork.Pool(2) as pool: got += pool.map(abs, [-5])
    with ProcessPoolExecutor(2, fork) as pool: got += pool.map(abs, [-6])
    with tempfile.TemporaryFile() as file:
        file.write(b"abc"), file.flush()
        got.append(mmap.mmap(file.fileno(), 3)[:])
    print(got)
"""
    expected = "[42, 2, None, 0.0, 'x', 5, 6, b'abc']"
    assert sandbox.run_stdio(program, [StdioTest("", expected)], PLENTY_S).result().results == [1]


def test_a_program_finds_nothing_of_the_one_before(sandbox):
    """A program that leaves the answers for the next one of its group would be rewarded."""
    leave = "import os\nopen('/tmp/left', 'w').write('x')\nos.mkdir('/dev/shm/left2')\nprint(1)"
    look = "import os\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'), os.getcwd())"
    for _ in range(2 * sandbox.num_slots):
        assert sandbox.run_stdio(leave, [StdioTest("", "1")] * 2, PLENTY_S).result().results == [1, 1]
        assert sandbox.run_stdio(look, [StdioTest("", "[] [] /tmp")], PLENTY_S).result().results == [1]


def test_after_all_that_nothing_is_left(sandbox, outcomes):
    """Whatever ran before in this file: a process or a file that stays is one more with every step of a run."""
    for slot in sandbox._slots:
        assert _sharing_network(slot.pid) == {slot.pid}
    for folder in ("/", "/tmp", "/var/tmp", "/dev/shm", os.getcwd()):
        assert not (Path(folder) / "mgrpo-hostile").exists()
    right = sandbox.run_stdio("print('right')", [StdioTest("", "right")], PLENTY_S).result()
    assert right.results == [1] and not right.runtimes[0] < 0


def _sharing_network(pid: int) -> set[int]:
    """Processes in one's network namespace: a program cannot leave it, also when it leaves its parents."""
    network, found = os.readlink(f"/proc/{pid}/ns/net"), set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "ns/net") == network:
                found.add(int(entry.name))
    return found
