"""Kernels: names last from call to call, whatever a call does; and what it does reaches nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from mgrpo.processes.lifetime import children
from mgrpo.sandbox.interpreters import CellOutput, Kernel, Kernels
from mgrpo.sandbox.walled import LostError, SandboxError
from tests.namespaces import run_as_somebody, skip_without_namespaces
from tests.unit.sandbox.conftest import SECRET
from tests.unit.sandbox.test_hostile import REFUSED, WITHOUT_SUCCESS, attempt

LIMIT_S = 0.3
# For calls that end by themselves, on a machine that does other things.
PLENTY_S = 20.0
DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
LOST = "It was restarted: all names and files are lost.\n"


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    skip_without_namespaces()
    os.environ["MGRPO_TEST_SECRET"] = SECRET
    with Kernels(memory_mb=256) as kernels:
        try:
            kernels.start()
        finally:
            del os.environ["MGRPO_TEST_SECRET"]
        yield kernels


def with_kernel(kernels: Kernels, use: Callable[[Kernel], Coroutine[Any, Any, Any]], output_bytes: int = 4000) -> Any:
    """What `use` returns for a fresh kernel."""

    async def run() -> Any:
        kernel = kernels.open(output_bytes=output_bytes)
        try:
            return await use(kernel)
        finally:
            kernel.close()

    return asyncio.run(run())


def outputs(kernels: Kernels, *calls: str | tuple[str, float], output_bytes: int = 4000) -> list[CellOutput]:
    """Of the calls, one after the other in one kernel."""

    async def use(kernel: Kernel) -> list[CellOutput]:
        found = []
        for call in calls:
            code, limit_s = (call, PLENTY_S) if isinstance(call, str) else call
            found.append(await kernel.call(code, limit_s))
        return found

    return with_kernel(kernels, use, output_bytes)


def texts(kernels: Kernels, *calls: str | tuple[str, float], output_bytes: int = 4000) -> list[str]:
    return [output.text for output in outputs(kernels, *calls, output_bytes=output_bytes)]


def test_names_last_and_a_last_expression_is_shown(kernels):
    """A model works in steps, and looks at values as at Python's prompt."""
    calls = ("import math\nx = 6", "def area(r):\n    return x * r", "print('on'); area(7)", "None", "x = 1;", "x, _")
    assert texts(kernels, *calls) == ["", "", "on\n42\n", "", "", "(1, 42)\n"]


def test_an_error_is_shown_as_python_shows_it(kernels):
    """With the lines of the code, also of earlier calls, and nothing of ours."""
    calls = ("def half(x):\n    return 1 / x", "print('before')\nhalf(0)", "half(2)", "1 +")
    _, raised, after, broken = outputs(kernels, *calls)
    assert raised.printed == "before\n" and raised.failed and raised.text == raised.printed + raised.error
    # Since Python 3.13 calls have carets as well.
    assert raised.error.replace("    ~~~~^^^\n", "") == (
        'Traceback (most recent call last):\n  File "<cell 2>", line 2, in <module>\n    half(0)\n'
        '  File "<cell 1>", line 2, in half\n    return 1 / x\n           ~~^~~\nZeroDivisionError: division by zero\n'
    )
    assert after == CellOutput(printed="0.5\n", error="")
    assert broken.error.startswith('  File "<cell 4>", line 1\n    1 +\n') and "SyntaxError: invalid" in broken.error


def test_everything_that_is_written_is_seen_in_its_order(kernels):
    """Also what goes past Python's own streams, and what a process of the code writes."""
    code = "import os, sys\nprint('a')\nos.write(1, b'b\\n')\nprint('c', file=sys.stderr)\n"
    code += "if os.fork() == 0:\n  print('d')\nelse:\n  os.wait()\n  print('e')"
    assert texts(kernels, code, "print('no newline', end='')\n1/0")[0] == "a\nb\nc\nd\ne\n"
    assert texts(kernels, "print('no newline', end='')\n1/0")[0].startswith("no newline\nTraceback")


def test_a_fork_does_not_answer_for_its_parent(kernels):
    """A second process at the end of a call would take the next call, with other names."""
    fork = "import os, time\nx = os.fork() == 0\nif not x: time.sleep(0.1); print('parent')"
    assert texts(kernels, fork, "x", "x") == ["parent\n", "False\n", "False\n"]


@pytest.mark.parametrize("code", ["exit()", "quit()", "import sys\nsys.exit(0)", "raise SystemExit"])
def test_leaving_ends_the_call_only(code, kernels):
    """Scripts that models write often end so."""
    assert outputs(kernels, "x = 1", code, "x")[1:] == [
        CellOutput(printed="", error=""),
        CellOutput(printed="1\n", error=""),
    ]


def test_there_is_no_input(kernels):
    """A call that waits for one would wait for its limit."""
    for text in texts(kernels, "input()", "exit()", "input()")[::2]:
        assert text.endswith("EOFError: EOF when reading a line\n")


def test_output_is_cut_in_the_middle(kernels):
    """A flood costs the model its context, and the service its memory."""
    flood, error = outputs(
        kernels, "print('a' * 50 + 'b' * 10**7 + 'c' * 50)", "raise ValueError('x' * 10**6)", output_bytes=80
    )
    assert flood.text == "a" * 40 + f"\n... {10**7 + 101 - 80} bytes left out ...\n" + "c" * 39 + "\n"
    assert len(error.text) < 160 and error.text.startswith("Traceback") and error.text.endswith("xxx\n")


def test_a_call_that_takes_too_long_is_interrupted_and_names_stay(kernels):
    """One endless loop must not cost a trajectory all it has computed."""
    late = "x = 5\nprint('begun')\nwhile True: pass"
    began = time.monotonic()
    first, second, swallowed, third = outputs(
        kernels,
        (late, LIMIT_S),
        "x",
        ("import time\ntry: time.sleep(99)\nexcept KeyboardInterrupt: x = 6", LIMIT_S),
        "x",
    )
    assert (
        first.printed == "begun\n" and "KeyboardInterrupt\nThe call took more than 0.3 s and was inter" in first.error
    )
    assert second.text == "5\n" and third.text == "6\n"
    assert swallowed.error == "The call took more than 0.3 s and was interrupted. Names are kept.\n"
    assert time.monotonic() - began < PLENTY_S


def test_a_call_that_cannot_be_interrupted_restarts_the_interpreter(kernels):
    """Else one deaf loop keeps a core for the rest of the run."""
    lost, after = outputs(
        kernels,
        ("deaf = open('left', 'w')\nprint('begun')\n" + DEAF, LIMIT_S),
        "import os\nprint(os.listdir(), 'deaf' in dir())",
    )
    assert lost.printed == "begun\n"
    assert lost.error == f"The call took more than 0.3 s and could not be interrupted. {LOST}"
    assert after.text == "[] False\n"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os\nos._exit(3)", "The interpreter ended with exit code 3. "),
        ("import os\nos.kill(os.getpid(), 9)", "The interpreter died of SIGKILL. "),
        ("import ctypes\nctypes.string_at(0)", "The interpreter died of SIGSEGV. "),
        ("import os\n_ = os.write(3, b'x' * 100)", "The interpreter died of SIGKILL. "),
    ],
)
def test_an_interpreter_that_dies_is_replaced(code, why, kernels):
    """The model is told; the trajectory goes on."""
    assert texts(kernels, "x = 1", "print(1)\n" + code, "2")[1:] == [f"1\n{why}{LOST}", "2\n"]


def test_names_outlive_an_allocation_that_is_refused(kernels):
    """Of a process alone, its address space is the limit."""
    assert texts(kernels, "x = 1", "y = bytearray(10**9)", "x")[1].endswith("MemoryError\n")
    assert texts(kernels, "x = 1", "y = bytearray(10**9)", "x")[2] == "1\n"


def test_the_processes_of_a_kernel_share_its_memory(kernels):
    """Each below its limit, 64 processes together would take 64 times the memory."""
    code = (
        "import os, time\nfor _ in range(4):\n  if os.fork() == 0:\n    x = b'x' * (120 * 2**20)\n    time.sleep(100)\n"
    )
    together, after = texts(kernels, code + "time.sleep(15)", "2")
    assert together == f"The code used more memory or processes than it may. {LOST}" and after == "2\n"


def test_many_short_calls_do_not_take_more_memory_than_a_long_one(kernels):
    """Memory is looked at every 50 ms, and once after each call."""
    code = "r, w = os.pipe()\nif os.fork() == 0:\n  x = b'x' * (6 * 2**20)\n  os.write(w, b'.')\n  time.sleep(100)\n"
    code += "done = os.read(r, 1), os.close(r), os.close(w)"
    tried = texts(kernels, "import os, time", *[code] * 58)
    assert f"The code used more memory or processes than it may. {LOST}" in tried


def test_between_calls_nothing_runs(kernels):
    """A thread or a process that is left behind would take the time of the others' calls."""
    count = "import threading, time\nseen = []\ndef look():\n  while True:\n    seen.append(time.monotonic())\n    time.sleep(0.001)\n"
    count += "threading.Thread(target=look, daemon=True).start()\ntime.sleep(0.05)"

    async def use(kernel: Kernel) -> str:
        await kernel.call(count, PLENTY_S)
        await asyncio.sleep(0.3)
        longest = "time.sleep(0.05)\nmax(after - before for before, after in zip(seen, seen[1:]))"
        return (await kernel.call(longest, PLENTY_S)).text

    assert float(with_kernel(kernels, use)) > 0.25


@pytest.fixture(scope="module")
def refusals(kernels: Kernels) -> dict[str, list[str]]:
    """Of what a wall refuses, tried in one kernel after the other way to use it: as calls among names that last."""
    tried = outputs(kernels, "kept = 7", *(attempt(statement) for statement in REFUSED.values()), "kept")
    assert tried[-1].text == "7\n"
    return dict(zip(REFUSED, (output.text for output in tried[1:-1]), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_a_wall_refuses_a_call(name, refusals):
    """Each of these, once it works, gives a model's output the machine that trains it."""
    assert refusals[name] == "refused\n"


@pytest.fixture(scope="module")
def survivals(kernels: Kernels) -> dict[str, tuple[CellOutput, str]]:
    """What hostile programs give as calls, each in a kernel of its own, and what the kernel says then."""

    async def survive(code: str, turn: asyncio.Semaphore) -> tuple[CellOutput, str]:
        async with turn:
            kernel = kernels.open(output_bytes=200)
            output = await kernel.call(code, LIMIT_S)
            # An error: what forks print while they end may come with any later call.
            after = await kernel.call("raise RuntimeError(6 * 7)", PLENTY_S)
            kernel.close()
            return output, after.error

    async def run() -> list[tuple[CellOutput, str]]:
        turn = asyncio.Semaphore(4)
        return await asyncio.gather(*(survive(code, turn) for code in WITHOUT_SUCCESS.values()))

    return dict(zip(WITHOUT_SUCCESS, asyncio.run(run()), strict=True))


@pytest.mark.parametrize("name", WITHOUT_SUCCESS)
def test_a_kernel_answers_after_a_call_that_runs_wild(name, survivals):
    """Every call gets one bounded answer, and the next one is served."""
    output, after = survivals[name]
    assert after.endswith("RuntimeError: 42\n") and len(output.text) < 600


def test_a_kernel_sees_nothing_of_the_run(kernels):
    """Tokens of the hub and of trackers stand in the environment of a run, and labels in its files."""
    code = "import os, sys\nseen = repr(os.environ) + repr(sys.argv)\nfor p in os.listdir('/proc'):\n"
    code += (
        "  for f in ('environ', 'cmdline'):\n    try: seen += open(f'/proc/{p}/{f}').read()\n    except OSError: pass\n"
    )
    code += f"print({SECRET!r} in seen, [name for name in sys.modules if name.startswith('mgrpo')], "
    code += f"os.path.exists({__file__!r}))"
    assert texts(kernels, code) == ["False [] False\n"]


def test_kernels_see_nothing_of_each_other(kernels):
    """A trajectory that finds what another one of its group has left is rewarded for the other's work."""

    async def run() -> list[str]:
        first, second = (kernels.open(output_bytes=4000) for _ in range(2))
        await first.call("import os, time\nopen('/tmp/answer', 'w').write('42')\nanswer = 42", PLENTY_S)
        look = (
            "import os\nos.listdir('/tmp'), 'answer' in dir(), sorted(p for p in os.listdir('/proc') if p.isdecimal())"
        )
        found = [(await kernel.call(look, PLENTY_S)).text for kernel in (first, second)]
        users = {(await kernel.call("os.getuid()", PLENTY_S)).text for kernel in (first, second)}
        first.close(), second.close()
        return [*found, str(len(users))]

    first, second, num_users = asyncio.run(run())
    assert first == "(['answer'], True, ['1', '2'])\n" and second == "([], False, ['1', '2'])\n"
    assert num_users == ("2" if os.geteuid() == 0 else "1")


def test_a_kernel_ends_with_its_connection(kernels):
    """Also in the middle of a call: a trajectory that is given up must not keep a core."""

    async def run() -> None:
        process = kernels._zygote.pid
        idle, busy, cancelled = (kernels.open(output_bytes=4000) for _ in range(3))
        await idle.call("x = 1", PLENTY_S)
        calls = [asyncio.create_task(kernel.call(DEAF, 200.0)) for kernel in (busy, cancelled)]
        await asyncio.sleep(0.1)
        idle.close(), busy.close(), calls[1].cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ended] == [LostError, asyncio.CancelledError]
        deadline = time.monotonic() + 60
        while any(children(child) for child in children(process)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    asyncio.run(run())


def test_a_lost_process_costs_its_kernels_and_is_replaced(kernels):
    """The machine may run out of memory, and its user may kill what he does not know."""

    async def run() -> str:
        kernel = kernels.open(output_bytes=4000)
        await kernel.call("x = 1", PLENTY_S)
        os.kill(kernels._zygote.pid, signal.SIGKILL)
        kernels._zygote._process.wait()
        with pytest.raises(LostError):
            while True:  # the processes of a kernel end a moment later
                await kernel.call("x", PLENTY_S)
        other = kernels.open(output_bytes=4000)
        text = (await other.call("'again'", PLENTY_S)).text
        other.close()
        return text

    assert asyncio.run(run()) == "'again'\n"


def test_a_kernel_that_cannot_be_opened_costs_the_others_nothing(kernels):
    """A process with many trajectories runs out of descriptors first."""

    async def run() -> str:
        kernel = kernels.open(output_bytes=4000)
        await kernel.call("x = 6", PLENTY_S)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(SandboxError, match=r"no kernel can be opened: .*Too many open files"):
                kernels.open(output_bytes=4000)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        text = (await kernel.call("x", PLENTY_S)).text
        kernel.close()
        return text

    assert asyncio.run(run()) == "6\n"


def test_without_walls_kernels_run_where_the_risk_is_accepted(tmp_path, monkeypatch):
    """Folders and processes of their own are what remains; nothing stays behind."""
    with Kernels(walls=["none"]) as kernels, pytest.raises(ValueError, match="accept_risk"):
        kernels.open(output_bytes=4000)
    daemon = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)\n  os._exit(0)\n"
    )
    daemon += "open('left', 'w').close()\nprint(os.listdir(), os.environ['TMPDIR'] == os.getcwd(), os.getcwd())"
    with Kernels(memory_mb=256, walls=["none"], accept_risk=True) as kernels:
        first, interrupted, second = texts(kernels, daemon, ("while True: pass", LIMIT_S), "1 + 1")
        assert first.startswith("['left'] True /") and "Names are kept" in interrupted and second == "2\n"
        folder, process = Path(first.split()[-1]), kernels._zygote.pid
        deadline = time.monotonic() + 60
        while folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert folder.parent.exists()
    assert not folder.parent.exists() and not Path(f"/proc/{process}").exists()


@pytest.mark.parametrize("walls", ["user", "none"])
def test_kernels_die_with_their_owner(walls, kernels):
    """An owner that is killed cannot clean up, and a call would run for ever."""
    script = f"""if True:
        import asyncio
        from mgrpo.sandbox.interpreters import Kernels
        async def main():
            kernels = Kernels(walls=[{walls!r}], accept_risk=True)
            kernel = kernels.open(output_bytes=100)
            await kernel.call("x = 1", 20.0)
            print(kernels._zygote.pid, flush=True)
            await kernel.call("while True: pass", 300.0)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        started = [int(owner.stdout.readline())]
        for pid in started:
            started += children(pid)
        assert len(started) == 4  # the process that forks, the one between, the supervisor, the interpreter
        while _ticks(started[-1]) < 20:  # until it is in the middle of the loop
            time.sleep(0.01)
        os.kill(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _ticks(pid: int) -> int:
    """Processor time of a process, in its own code."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


_CROWD = """
async def crowd(kernels):
    opened = [kernels.open(output_bytes=300) for _ in range(16)]
    start = "import threading\\nwait = threading.Event().wait\\n"
    start += "for _ in range(5): threading.Thread(target=wait, daemon=True).start()\\nthreading.active_count()"
    answers = [(await kernel.call(start, 20.0)).text for kernel in opened]
    for kernel in opened: kernel.close()
    return answers
"""


def test_kernels_do_not_share_the_limit_on_processes(kernels):
    """It is counted for a user: with 64 trajectories none could start a thread."""
    names: dict[str, Any] = {}
    exec(_CROWD, names)
    assert asyncio.run(names["crowd"](kernels)) == ["6\n"] * 16


def test_kernels_do_not_share_the_memory_of_sockets():
    """With 200 trajectories at once each was told that it used too much memory."""
    skip_without_namespaces()
    pairs = "import socket\npairs = [socket.socketpair() for _ in range(40)]"

    async def use(kernels: Kernels) -> list[str]:
        opened = [kernels.open(output_bytes=300) for _ in range(3)]
        answers = [
            (await kernel.call(code, PLENTY_S)).text
            for kernel, code in zip(opened, (pairs, pairs, "1 + 1"), strict=True)
        ]
        for kernel in opened:
            kernel.close()
        return answers

    with Kernels(memory_mb=64) as kernels:
        assert asyncio.run(use(kernels)) == ["", "", "2\n"]


def test_kernels_of_an_ordinary_user_share_it_generously(kernels):
    """Such a user has one id for all; the supervisor counts the processes of each kernel."""
    script = """
import asyncio
import json
from mgrpo.sandbox.interpreters import Kernels
with Kernels(memory_mb=256) as kernels:
    isolation = kernels.start()
    async def bomb():
        kernel = kernels.open(output_bytes=300)
        code = "import os, time\\nfor _ in range(200):\\n  if os.fork() == 0: time.sleep(100)\\ntime.sleep(15)"
        return (await kernel.call(code, 20.0)).text
    print(json.dumps([isolation.walls, asyncio.run(crowd(kernels)), asyncio.run(bomb())]))
"""
    walls, answers, bomb = json.loads(run_as_somebody(_CROWD + script))
    assert walls == "user" and answers == ["6\n"] * 16
    assert bomb == f"The code used more memory or processes than it may. {LOST}"


def test_kernels_stand_behind_the_walls_of_root(kernels):
    """Where user namespaces are forbidden, root sets the same walls up without."""
    if os.geteuid() != 0:
        pytest.skip("only root can set up namespaces outside of a user namespace")
    with Kernels(memory_mb=256, walls=["root"]) as kernels:
        assert kernels.start().missing == ()
        code = "import os\nos.getuid(), os.listdir(), sorted(p for p in os.listdir('/proc') if p.isdecimal())"
        assert texts(kernels, "x = 1", ("while True: pass", LIMIT_S), "x", code)[2:] == [
            "1\n",
            "(60600, [], ['1', '2'])\n",
        ]
