"""What isolates programs on this machine is found out by trying, and too little of it is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mgrpo.sandbox.cases import StdioTest
from mgrpo.sandbox.isolation import Isolation
from mgrpo.sandbox.paths import readable_paths, search_path
from mgrpo.sandbox.sandbox import Sandbox
from tests.namespaces import run_as_somebody, skip_without_namespaces

PLENTY_S = 20.0


def test_all_layers_hold_where_namespaces_do(sandbox):
    """The report at the start of a service is what its owner trusts."""
    isolation = sandbox.start()
    assert isolation.walls in ("user", "root") and isolation.missing == () and isolation.unprivileged
    assert "own processes only, own files only, no network, unprivileged user" in isolation.describe()
    for slot in sandbox._slots:
        for kind in ("net", "mnt", "uts"):
            assert os.readlink(f"/proc/{slot.pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")


def test_a_machine_without_walls_is_refused_unless_the_risk_is_accepted():
    """Without namespaces a program can read and destroy whatever the service's user can."""
    with Sandbox(num_slots=1, walls=["none"]) as sandbox, pytest.raises(ValueError, match="accept_risk") as refusal:
        sandbox.start()
    assert "code_sandbox_accept_risk=true" in str(refusal.value) and "missing: own processes only" in str(refusal.value)
    with Sandbox(num_slots=1, walls=["none"]) as sandbox, pytest.raises(ValueError, match="accept_risk"):
        sandbox.run_asserts("", ["assert True"], PLENTY_S)


def test_walls_that_cannot_be_raised_are_named():
    """The user of a refused machine needs to know what to change."""
    isolation = Isolation(
        walls="none",
        processes=False,
        files=False,
        network=True,
        unprivileged=True,
        system_calls=False,
        reasons=("user: unshare: Operation not permitted",),
    )
    assert isolation.missing == ("processes", "files")
    with pytest.raises(ValueError, match="unshare: Operation not permitted"):
        isolation.refuse_if_missing(accept_risk=False)
    isolation.refuse_if_missing(accept_risk=True)


def test_walls_rise_wherever_python_lies(sandbox):
    """Clones and environments below /tmp are common in CI; the program's own /tmp must neither show nor hide them."""
    with TemporaryDirectory(dir="/tmp", prefix="with space ") as python, TemporaryDirectory(dir="/dev/shm") as packages:
        _copy_python(Path(python))
        environment = Path(packages)
        (environment / "bin").mkdir()
        (environment / "bin/python").symlink_to(f"{python}/bin/python")
        (environment / "pyvenv.cfg").write_text(f"home = {python}/bin\n")
        names = Path(sysconfig.get_path("purelib", "venv", {"base": packages}))
        names.mkdir(parents=True)
        (names / "planted.py").write_text("value = 7")
        script = """if True:
            import os, sys
            sys.path.insert(0, sys.argv[1])
            import asyncio
            from mgrpo.sandbox.cases import StdioTest
            from mgrpo.sandbox.interpreters import Kernels
            from mgrpo.sandbox.sandbox import Sandbox
            program = '''if True:
                import encodings.idna, inspect, json.tool, os, tempfile, planted
                inspect.getsource(json)
                print(planted.value, os.listdir("/tmp"), os.listdir("/dev/shm"), tempfile.gettempdir())
                try: open(os.__file__, "a"), print("got through")
                except OSError: print("refused")
            '''
            expected = "7 [] [] /tmp\\nrefused"
            with Sandbox(num_slots=1) as sandbox:
                isolation = sandbox.start()
                results = sandbox.run_stdio(program, [StdioTest("", expected)], 20.0).result().results
            async def call(kernels):
                return (await kernels.open(output_bytes=300).call("import ctypes.util, os, planted; print(planted.value, os.listdir())", 20.0)).text
            with Kernels() as kernels:
                called = asyncio.run(call(kernels))
            print(sys.base_prefix, isolation.missing, isolation.system_calls, results, called, end="")
        """
        command = [str(environment / "bin/python"), "-c", script, str(Path(__file__).parents[3])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    system_calls = sandbox.start().system_calls
    assert done.stdout == f"{python} () {system_calls} [1] 7 []\n"


def _copy_python(target: Path) -> None:
    """An interpreter and its standard library, without what takes space."""
    base = Path(sys.base_prefix)
    library = Path(sysconfig.get_path("stdlib")).relative_to(base)
    large = ("site-packages", "dist-packages", "test", "idlelib", "ensurepip", "lib2to3", "pydoc_data", "config-*")
    skipped = shutil.ignore_patterns(*large)
    shutil.copytree(base / library, target / library, ignore=skipped, copy_function=_link, symlinks=True)
    (target / "bin").mkdir()
    shutil.copy(Path(sys.executable).resolve(), target / "bin/python")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def test_a_failure_is_not_called_a_prohibition(monkeypatch):
    """Told to change the kernel's settings, the user of a machine that allows walls would give up isolation instead."""
    monkeypatch.setattr("mgrpo.sandbox.walled.readable_paths", lambda: ("/usr/lib",))
    with Sandbox(num_slots=1, walls=["user", "none"]) as sandbox, pytest.raises(ValueError) as refusal:
        sandbox.start()
    message = str(refusal.value)
    assert "; user: ModuleNotFoundError: No module named" in message and "The kernel does not forbid them" in message
    assert "sysctl" not in message and "accept_risk" not in message


def test_an_environment_that_programs_cannot_read_is_refused(tmp_path, monkeypatch):
    """Root's programs are another user; installed under umask 077, no package could be imported, and every score were 0."""
    skip_without_namespaces()
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr("mgrpo.sandbox.walled.search_path", lambda: (*search_path(), str(closed)))
    monkeypatch.setattr("mgrpo.sandbox.walled.readable_paths", lambda: (*readable_paths(), str(closed)))
    with Sandbox(num_slots=1) as sandbox:
        if os.geteuid() == 0:
            with pytest.raises(RuntimeError, match=f"cannot read {closed}.*chmod -R a"):
                sandbox.start()
        else:
            assert sandbox.start().missing == ()


def test_programs_run_without_walls_where_the_risk_is_accepted(tmp_path, monkeypatch):
    """Limits apply, leftover processes are killed, and the scratch folder is removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.getuid() and folder.stat().st_mode & 0o011 == 0:
            monkeypatch.setattr("tempfile.tempdir", None)
    daemon = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(1000)\n  os._exit(0)\n"
    daemon += "open('left', 'w').write('x')\nprint('right')"
    with Sandbox(num_slots=1, walls=["none"], accept_risk=True, memory_mb=256) as sandbox:
        before = _descendants()
        for _ in range(2):
            verdicts = sandbox.run_stdio(daemon, [StdioTest("", "right"), StdioTest("", "wrong")], PLENTY_S).result()
            assert verdicts.results == [1, 0]
        deep = "import os\nfor _ in range(2000):\n  os.mkdir('d', 0o700)\n  os.chdir('d')\nos.chmod('..', 0)"
        assert sandbox.run_asserts(deep, ["assert True"] * 2, PLENTY_S).result().results == [1, 1]
        assert sandbox.run_asserts("x = bytearray(2**29)", ["assert True"], PLENTY_S).result().results == [0]
        assert sandbox.run_asserts("def f():\n while 1: pass", ["f()", "assert 1"], 1.0).result().results == [0, 1]
        assert len(_descendants() - before) == 1  # the slot's own
        assert all(list(folder.iterdir()) == [] for folder in tmp_path.iterdir())
    assert _descendants() <= before and list(tmp_path.iterdir()) == []


def test_an_ordinary_user_has_the_same_walls(sandbox):
    """Most machines run the service as an ordinary user; supervisor and program then share one user id."""
    script = """assert os.geteuid() == 4711
hostile = '''if True:
    import os, resource
    for attempt in ("open('/etc/passwd')", "open('/proc/1/mem')", "open('/x', 'w')", "open(os.__file__, 'a')",
                    "os.setuid(0)", "os.readlink('/proc/1/fd/0')",
                    "resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1))"):
        try: exec(attempt)
        except OSError: pass
        else: print("got through", attempt)
    os.kill(1, 9)
    print("right")
'''
with Sandbox(num_slots=1) as sandbox:
    isolation = sandbox.start()
    verdicts = sandbox.run_stdio(hostile, [StdioTest("", "right")] * 2, 20.0).result()
exposed = '''if True:
    import os
    try: open(f"/proc/{os.getppid()}/mem")
    except OSError: print("right")
'''
with Sandbox(num_slots=1, walls=["none"], accept_risk=True) as sandbox:
    memory = sandbox.run_stdio(exposed, [StdioTest("", "right")], 20.0).result()
print(json.dumps([isolation.walls, isolation.missing, isolation.unprivileged, verdicts.results, memory.results]))
"""
    assert json.loads(run_as_somebody(script)) == ["user", [], True, [1, 1], [1]]


def test_a_machine_that_forbids_namespaces_is_refused(sandbox):
    """Many containers do; there the first hostile program could access the whole container, tokens included."""
    script = """
Path("/proc/sys/user/max_user_namespaces").write_text("0")
linux.drop_capabilities()
with Sandbox(num_slots=1) as sandbox:
    try: sandbox.start()
    except ValueError as err: refusal = str(err)
with Sandbox(num_slots=1, accept_risk=True) as sandbox:
    isolation = sandbox.start()
    verdicts = sandbox.run_asserts("", ["assert True", "assert False"], 20.0).result()
print(json.dumps([refusal, isolation.walls, isolation.missing, verdicts.results]))
"""
    refusal, *accepted = json.loads(run_as_somebody(script))
    assert "user: [Errno 28] unshare" in refusal and "root: [Errno 1] unshare" in refusal and "--accept_risk" in refusal
    assert accepted[0] == "none" and accepted[1][:2] == ["processes", "files"] and accepted[2] == [1, 0]


def test_programs_die_with_the_service(sandbox):
    """A service that is killed cannot clean up, and a program that it ran would go on for ever."""
    script = """if True:
        import time
        from mgrpo.sandbox.sandbox import Sandbox
        sandbox = Sandbox(num_slots=1)
        sandbox.start()
        sandbox.run_asserts("import os\\nos.fork()\\nwhile True: pass", ["assert True"], 300.0)
        time.sleep(1000)
    """
    with subprocess.Popen([sys.executable, "-c", script]) as service:
        # The slot, its fork, the supervisor, the program and its fork.
        _wait_until(lambda: len(_descendants(service.pid)) >= 5)
        started = _descendants(service.pid)
        os.kill(service.pid, signal.SIGKILL)
    _wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _descendants(of: int | None = None) -> set[int]:
    """All descendants of a process, by default of this one."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = set(), {of or os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return found
